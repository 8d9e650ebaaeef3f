"""What torch_npu registers for its device: `python registrations.py`, where torch and torch_npu can be imported."""

from __future__ import annotations

import json
import re

KERNEL, HOST = "npu", "host"
"""Computed on the device; or registered as what copies operands to the host, computes there, and copies back."""


def registered() -> dict[str, str]:
    """KERNEL or HOST by operation of torch's own, as "aten::add.Tensor"."""
    import torch
    import torch_npu  # noqa: F401  # which registers them

    names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    return {name: where(torch._C._dispatch_dump(name)) for name in sorted(names) if name.startswith("aten::")}


def where(dump: str) -> str:
    """Of an operation, by torch's account of its kernels, which tells the file that registered each."""
    own = re.search(r"^PrivateUse1(?:\[alias\])?: (.*)$", dump, re.MULTILINE)
    return HOST if own is None or "fallback" in own[1].lower() else KERNEL


if __name__ == "__main__":
    import torch_npu

    print(json.dumps({"torch_npu": torch_npu.__version__, "operations": registered()}))
