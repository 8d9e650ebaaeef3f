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
    """Tensors that are being copied to the host, into buffers that are used again once they are read."""

    def __init__(self, buffers: list[torch.Tensor], moment: Moment) -> None:
        self.buffers, self.moment = buffers, moment
        self._rows = 0

    def start(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Queue copies of tensors of as many rows each, no more than buffers have, behind what makes them."""
        self._rows = len(tensors[0])
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            buffer[: self._rows].copy_(tensor, non_blocking=True)
        self.moment.record()

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """What has come; only once the device has passed `moment`."""
        return tuple(buffer[: self._rows].numpy().copy() for buffer in self.buffers)


class Queue:
    """A device's queue of work, as a runner's thread sees it. Nothing here waits."""

    def __init__(
        self, device: torch.device, rows: int, moment: Callable[[], Moment] | None = None, *, pinned: bool = False
    ) -> None:
        """rows: that a fetched tensor has at most. `moment` makes what tells the device's time; events by default.
        pinned: whether the host has memory that the device copies to by itself."""
        self._rows, self._pinned = rows, pinned
        self._make = moment or (lambda: torch.Event(device=device, enable_timing=True))
        self._spare: list[Arrival] = []

    def moment(self) -> Moment:
        """Now."""
        made = self._make()
        made.record()
        return made

    def fetch(self, *tensors: torch.Tensor) -> Arrival:
        """Copies of a few KB to the host; always of as many tensors, of the same types and widths."""
        if self._spare:
            arrival = self._spare.pop()
        else:
            buffers = [
                torch.empty((self._rows, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=self._pinned)
                for tensor in tensors
            ]
            arrival = Arrival(buffers, self._make())
        arrival.start(tensors)
        return arrival

    def read(self, arrival: Arrival) -> None:
        """It is read, and its moment is not asked any more."""
        self._spare.append(arrival)


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


def queue_of(device: torch.device, rows: int) -> Queue:
    """Of a runner's device, for tensors of so many rows at most."""
    if device.type == "cpu":
        return Queue(device, rows, lambda: HostMoment(time.perf_counter))
    from vllm.utils.platform_utils import is_pin_memory_available

    return Queue(device, rows, pinned=is_pin_memory_available())
