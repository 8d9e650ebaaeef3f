"""What a device has computed, on its way to a host that does not wait for it."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray


class Moment(Protocol):
    """A point of a device's queue of work: `torch.Event`."""

    def record(self) -> None:
        """It is here, behind all work that was queued before."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this moment to another; the device must have passed both."""


class Arrival:
    """Tensors that are being copied to the host."""

    def __init__(self, copies: tuple[torch.Tensor, ...], moment: Moment) -> None:
        self._copies, self.moment = copies, moment

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """What has come; only once the device has passed `moment`."""
        return tuple(copy.numpy() for copy in self._copies)


class Queue:
    """A device's queue of work, as a runner's thread sees it. Nothing here waits."""

    def __init__(self, device: torch.device, moment: Callable[[], Moment] | None = None) -> None:
        """`moment` makes what tells the device's time; events of that device by default."""
        self._make = moment or (lambda: torch.Event(device=device, enable_timing=True))

    def moment(self) -> Moment:
        """Now."""
        made = self._make()
        made.record()
        return made

    def fetch(self, *tensors: torch.Tensor) -> Arrival:
        """Copies of a few KB, queued behind what makes them: into pinned memory, where the device has it."""
        return Arrival(tuple(tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors), self.moment())


class HostMoment:
    """Of a device that is the host, and so has passed every moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.at = clock, 0.0

    def record(self) -> None:
        """See Moment."""
        self.at = self._clock()

    def query(self) -> bool:
        """See Moment."""
        return True

    def synchronize(self) -> None:
        """See Moment."""

    def elapsed_time(self, end: "HostMoment") -> float:
        """See Moment."""
        return 1000.0 * (end.at - self.at)


def queue_of(device: torch.device) -> Queue:
    """Of a runner's device."""
    return Queue(device, (lambda: HostMoment(time.perf_counter)) if device.type == "cpu" else None)
