"""What the device computes: what the CPU does, on the device's memory.

Where a tensor lies in memory (views) is settled on the device's own tensors, by torch's code for any device. All else
that no composite of torch's takes apart comes to `_compute`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from npu.memory import NAME, on_device, to_device, to_host

Watcher = Callable[[Any], None]

_watchers: list[Watcher] = []
_HOST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten
_VIEWS = (
    *(_aten.as_strided.default, _aten.view.default, _aten._reshape_alias.default, _aten.unfold.default),
    *(_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset),
)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every operation that reaches the device, by torch's OpOverload."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def register() -> list[torch.library.Library]:
    """Give torch the device's operations; they last as long as what is returned."""
    aten, every = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for view in _VIEWS:
        aten.impl(view._name.removeprefix("aten::"), functools.partial(_look, view), "PrivateUse1")
    for name, function in {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "resize_": _resize,
        "_to_copy": _to_copy,
        "copy_": _copy,
    }.items():
        aten.impl(name, function, "PrivateUse1")
    every.fallback(_compute, "PrivateUse1")
    return [aten, every]


def _tell(op: Any) -> None:
    for watcher in _watchers:
        watcher(op)


def _look(view: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    _tell(view)
    seen: torch.Tensor = view.redispatch(_HOST_KEYS, tensor, *args, **kwargs)  # which looks at no value
    return seen


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    _tell(_aten.empty.memory_format)
    layout = memory_format or torch.contiguous_format
    return to_device(torch.empty(size, dtype=dtype, device="cpu", memory_format=layout))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    _tell(_aten.empty_strided.default)
    return to_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    _tell(_aten.resize_.default)
    if tuple(tensor.shape) == tuple(size):
        return tensor
    fresh = _empty(size, dtype=tensor.dtype)
    kept = min(fresh.numel(), tensor.numel())
    if kept:
        to_host(fresh).view(-1)[:kept] = to_host(tensor).reshape(-1)[:kept]
    put = _aten.set_.source_Storage_storage_offset
    put.redispatch(_HOST_KEYS, tensor, fresh.untyped_storage(), 0, fresh.size(), fresh.stride())
    return tensor


def _copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _tell(_aten.copy_.default)
    here, there = (to_host(each) if on_device(each) else each for each in (tensor, source))
    here.copy_(there)
    return tensor


def _to_copy(tensor: torch.Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """torch's own wants pinned memory for what the host does not wait for."""
    _tell(_aten._to_copy.default)
    copied = (to_host(tensor) if on_device(tensor) else tensor).to(dtype=dtype or tensor.dtype, copy=True)
    return copied if device is not None and device.type == "cpu" else to_device(copied)


@functools.cache
def _is_view(op: Any) -> bool:
    aliases = [returned.alias_info for returned in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _as_declared(argument: Any, value: Any) -> Any:
    """torch hands a number over as such also where an operation is declared to take a tensor."""
    wanted = isinstance(argument.type, torch.TensorType) and isinstance(value, int | float)
    return torch.tensor(value, device="cpu") if wanted else value


class _Call:
    """One operation's operands on the host, and which of the device's they are."""

    def __init__(self) -> None:
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Operands of the device, each after its memory on the host."""
        self.strangers: list[torch.Tensor] = []
        """Operands on the host that are more than a number."""

    def lower(self, value: Any) -> Any:
        """An operand as the host takes it."""
        if isinstance(value, torch.Tensor):
            if not on_device(value):
                self.strangers.extend([value] if value.dim() else [])
                return value
            self.own.append((to_host(value), value))
            return self.own[-1][0]
        if isinstance(value, list | tuple):
            return type(value)(self.lower(each) for each in value)
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    def lift(self, value: Any) -> Any:
        """A result as the device gives it: the operand that it is, or a new tensor."""
        if isinstance(value, torch.Tensor):
            for host, mine in self.own:
                if host is value:
                    return mine
            return to_device(value)
        return type(value)(self.lift(each) for each in value) if isinstance(value, list | tuple) else value


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises RuntimeError where operands are on several devices; a number on the host may go with any."""
    _tell(op)
    if _is_view(op):
        raise NotImplementedError(f"{op}: a view that the emulated device does not have")
    call = _Call()
    with torch._C.DisableTorchFunctionSubclass():  # parameters are of classes of vLLM's
        lowered, named = call.lower(args), {name: call.lower(value) for name, value in kwargs.items()}
        if call.own and call.strangers:
            raise RuntimeError(
                f"{op}: Expected all tensors to be on the same device, but found at least two devices, "
                f"{call.own[0][1].device} and {call.strangers[0].device}"
            )
        result = op(*map(_as_declared, op._schema.arguments, lowered), **named)
        for host, mine in call.own:
            if host.shape != mine.shape:  # an `out` that was given without room
                _resize(mine, host.shape)
                to_host(mine).copy_(host)
        return call.lift(result)
