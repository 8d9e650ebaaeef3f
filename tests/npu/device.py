"""A device named `npu` for PyTorch, on a machine that has none: what an NPU's plugin for torch would bring.

Its tensors are tensors of torch's PrivateUse1 backend, as an NPU's are: they refuse to be mixed with the host's, to
become arrays of numpy, and to be reached by their address. What it computes, the host does, at once: streams and
events are moments at which all is done. Only for a process of its own, since torch takes such a device once and never
forgets it. Nothing here says how an NPU computes, or how fast.
"""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import backend_registration

from npu import kernels
from npu.memory import NAME

MEMORY_BYTES = 4 << 30


class Event:
    """A moment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """It is now."""
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """It has passed."""
        return True

    def synchronize(self) -> None:
        """It has passed."""

    def wait(self, stream: Any = None) -> None:
        """It has passed."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1e3 * (end._seconds - self._seconds)


class Stream:
    """A queue that is always empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device(NAME, 0)

    def record_event(self, event: Event | None = None) -> Event:
        """A moment: now."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Nothing is queued."""
        return True

    def synchronize(self) -> None:
        """Nothing is queued."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is queued."""

    def wait_event(self, event: Any) -> None:
        """It has passed."""


class Generator(torch.Generator):
    """Of random numbers, which are the host's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, device="cpu" if torch.device(device).type == NAME else device)


class Backend:
    """`torch.npu`."""

    Event, Stream = Event, Stream

    def _lazy_init(self) -> None:
        """There is nothing to start."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        """It is."""
        return True

    def is_available(self) -> bool:
        """It is."""
        return True

    def device_count(self) -> int:
        """One."""
        return 1

    def current_device(self) -> int:
        """The one."""
        return 0

    def set_device(self, device: Any) -> None:
        """The one."""

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the host's."""

    def synchronize(self, device: Any = None) -> None:
        """Nothing is queued."""

    def current_stream(self, device: Any = None) -> Stream:
        """Any."""
        return Stream()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        """Nothing changes."""
        return nullcontext()

    def set_stream(self, stream: Any) -> None:
        """Nothing changes."""

    def empty_cache(self) -> None:
        """There is none."""

    def empty_host_cache(self) -> None:
        """There is none."""

    def get_memory_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes."""
        return MEMORY_BYTES, MEMORY_BYTES


@functools.cache
def install() -> Any:
    """Give torch the device, for the life of this process."""
    backend = Backend()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=backend)
    # What plugins for such devices put in place of CUDA's names, which vLLM's runners use for all.
    torch.Event = torch.cuda.Event = Event  # type: ignore[misc,assignment]
    torch.cuda.Stream = Stream  # type: ignore[misc,assignment]
    torch.Generator = Generator  # type: ignore[misc]
    for name in ("current_stream", "stream", "set_stream"):
        setattr(torch.cuda, name, getattr(backend, name))
    for name in ("synchronize", "empty_cache", "empty_host_cache", "get_memory_info", "device_count", "current_stream"):
        setattr(torch.accelerator, name, getattr(backend, name))
    torch.accelerator.set_device_index = backend.set_device
    torch.accelerator.current_device_index = backend.current_device
    return kernels.register()
