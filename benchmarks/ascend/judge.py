"""Whether the operations that were met are those of a device, by what its plugin for torch registers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ascend.registrations import HOST, KERNEL

FORBIDDEN = ("float64", "complex")
"""Beginnings of dtypes that an NPU does not compute with, or on its scalar units alone."""
COMPOSITE = "composite"


def judge(operation: str, reaches: Iterable[str], registered: dict[str, str]) -> str:
    """KERNEL where it is registered for the device, COMPOSITE where torch makes it of such as are, HOST where a part of
    it is computed on the host, "absent" where nothing would compute it but torch_npu's fallback, which is the host."""
    found = registered.get(operation)
    if found is not None:
        return found
    parts = [registered.get(part, "absent") for part in reaches if part != operation]
    if operation in reaches or "absent" in parts:
        return "absent"
    return HOST if HOST in parts else COMPOSITE


def problems(walked: dict[str, dict[str, Any]], registered: dict[str, str]) -> list[str]:
    """What of a walk an NPU would not compute, a line each."""
    found = []
    for operation, met in walked.items():
        verdict = judge(operation, met["reaches"], registered)
        if verdict not in (KERNEL, COMPOSITE):
            found.append(f"{operation}: {verdict}")
        if wide := [dtype for dtype in met["dtypes"] if dtype.startswith(FORBIDDEN)]:
            found.append(f"{operation}: computed with {', '.join(wide)}")
    return found
