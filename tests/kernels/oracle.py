"""`python -m kernels.oracle FILE`: run every case through vLLM's own kernel, in Triton's interpreter.

A process of its own, because vLLM decides once whether there is Triton: here it is told of a CPU back end that
Triton's wheel does not have, and everywhere else it finds none.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any


class Driver:
    """What Triton and vLLM ask of a back end's driver."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def pretend_cpu_backend() -> None:
    """Before anything imports vLLM."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    triton.backends.backends["cpu"] = triton.backends.Backend(None, Driver)  # type: ignore[arg-type]


def accept_integer_masks() -> None:
    """The `and` of a Python bool and a tensor becomes int32 in the interpreter, which then refuses it as a mask."""
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_masked_load = boolean_mask(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = boolean_mask(InterpreterBuilder.create_masked_store, 2)


def boolean_mask(method: Any, position: int) -> Any:
    """The method with the argument at a position made boolean."""

    def masked(self: Any, *args: Any, **kwargs: Any) -> Any:
        args[position].data = args[position].data.astype(bool)
        return method(self, *args, **kwargs)

    return masked


def have_isnan() -> None:
    """Triton's libdevice is a GPU library; one kernel uses its isnan."""
    from vllm.v1.worker.gpu.metrics import logits

    logits.libdevice = SimpleNamespace(isnan=lambda x: x != x)


def provide_log1p() -> None:
    """The interpreter has none. Exact to a rounding of 1 + x."""
    from triton import language
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: language.log(x + 1.0)


def main(file: str) -> None:
    pretend_cpu_backend()
    accept_integer_masks()
    provide_log1p()
    import torch
    from vllm.triton_utils import HAS_TRITON

    from kernels.launch import SEEDS, Random, all_cases

    assert HAS_TRITON, "vLLM does not believe in the pretended back end"
    have_isnan()
    results = {}
    for case in all_cases():
        module, _, name = case.name.rpartition(".")
        kernel = getattr(importlib.import_module(module), name)
        for seed in SEEDS:
            results[case.id, seed] = case.make(Random(seed)).run(kernel)
    torch.save(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
