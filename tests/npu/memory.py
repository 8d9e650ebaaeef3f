"""Device memory that is the host's under other addresses: one block, seen as a tensor of either device.

A device tensor's address is the host's plus AWAY, where nothing can be mapped. Who takes it for one of the host's, by
ctypes or in compiled code, ends with SIGSEGV, as on a machine whose device has memory of its own.
"""

from __future__ import annotations

import ctypes

import torch

NAME = "npu"
AWAY = 1 << 60
_HOST, _EXTENSION = 1, 12
"""DLPack's names of the two devices; torch reads the second as PrivateUse1."""

_address_of = ctypes.pythonapi.PyCapsule_GetPointer
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Head(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = [("data", ctypes.c_uint64), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the device."""
    return tensor.device.type == NAME


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor's memory as a device tensor."""
    return _moved(tensor, _EXTENSION, AWAY)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A device tensor's memory as a host tensor. One without elements has no memory to share."""
    if not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return _moved(tensor, _HOST, -AWAY)


def _moved(tensor: torch.Tensor, device: int, distance: int) -> torch.Tensor:
    dtype = tensor.dtype
    as_bytes = dtype.itemsize == 1 and dtype != torch.uint8  # DLPack has not all of them
    capsule = torch._C._to_dlpack(tensor.view(torch.uint8) if as_bytes else tensor)
    head = _Head.from_address(_address_of(capsule, b"dltensor"))
    head.data, head.device_type, head.device_id = head.data + distance, device, 0
    moved = torch._C._from_dlpack(capsule)
    return moved.view(dtype) if as_bytes else moved
