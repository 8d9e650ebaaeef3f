"""From a kernel's builder to something that takes tensors, or to the AscendC it becomes."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from deepinfer_vllm.platforms.tilelang.dialect import ASCEND, C

Builder = Callable[..., Any]


def target_of(tensor: torch.Tensor) -> str:
    """TileLang's target where `tensor` lies. Raises ValueError on any other device than "cpu" and "npu"."""
    targets = {"cpu": C, "npu": ASCEND}
    if tensor.device.type not in targets:
        raise ValueError(f"a tensor on {tensor.device} for a kernel of {sorted(targets)}: move it to one of these")
    return targets[tensor.device.type]


def dtype_name(tensor: torch.Tensor) -> str:
    """As TileLang calls it."""
    return str(tensor.dtype).removeprefix("torch.")


def held(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as `Dialect.held` says its buffer is typed."""
    return tensor.view(torch.uint16) if tensor.is_cpu and tensor.dtype == torch.bfloat16 else tensor


@functools.cache
def compiled(build: Builder, target: str, *arguments: Any) -> Callable[..., None]:
    """The kernel `build(target, *arguments)`, which writes to the last tensors it is given. Compiled once a process."""
    import tilelang

    backend = "cython" if target == C else "auto"
    kernel: Callable[..., None] = tilelang.compile(build(target, *arguments), target=target, execution_backend=backend)
    return kernel


def emitted(build: Builder, *arguments: Any) -> str:
    """The AscendC of `build("ascend", *arguments)`. Needs no CANN, and says nothing about whether CANN takes it."""
    from tilelang import tvm
    from tilelang.engine.lower import lower

    with tvm.target.Target(ASCEND):
        source: str = lower(build(ASCEND, *arguments), target=ASCEND, enable_device_compile=False).kernel_source
    return source


def slice_of(width: int, most: int) -> int:
    """The largest divisor of `width` that is no more than `most`."""
    return next(part for part in range(min(width, most), 0, -1) if width % part == 0)


def filled_up(rows: torch.Tensor, tile: int) -> torch.Tensor:
    """Rows [T, n], zeros behind them where there are fewer than a tile."""
    missing = tile - rows.shape[0]
    return rows if missing <= 0 else torch.nn.functional.pad(rows, (0, 0, 0, missing))
