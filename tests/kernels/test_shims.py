"""What lets runner V2 start without Triton: the shims of compat.runner_v2, in this process."""

import importlib
import pkgutil
import sys
import types
from typing import Any

import pytest

import deepinfer_vllm
from deepinfer_vllm.compat import runner_v2
from deepinfer_vllm.torch_kernels import registry

pytest.importorskip("vllm")


def a_kernel(logits_ptr: Any, vocab_size: int, BLOCK_SIZE: int) -> None:
    """Stands for one of Triton's."""


@pytest.mark.parametrize(
    ("parameters", "fitting"),
    [
        (("logits_ptr", "vocab_size", "BLOCK_SIZE"), True),
        (("logits_ptr", "BLOCK_SIZE"), False),  # vocab_size would be missing
        (("logits_ptr", "vocab_size", "stride", "BLOCK_SIZE"), False),
        (("vocab_size", "logits_ptr", "BLOCK_SIZE"), False),
        (("logits_ptr", "vocab_size", "BLOCK_SIZE", "USE_FP64"), False),
    ],
)
def test_a_function_must_have_the_kernels_parameters(parameters: tuple[str, ...], fitting: bool) -> None:
    assert registry.fits(parameters, a_kernel) is fitting


def test_a_missing_kernel_is_named_in_one_line() -> None:
    kernel = runner_v2.UnlaunchableKernel(a_kernel)
    assert kernel.arg_names == ("logits_ptr", "vocab_size", "BLOCK_SIZE")
    for launch in (lambda: kernel[(1,)](None, 1, BLOCK_SIZE=1), lambda: kernel(None, 1, 1)):
        with pytest.raises(RuntimeError) as error:
            launch()
        text = str(error.value)
        assert f"{__name__}.a_kernel" in text and "VLLM_USE_V2_MODEL_RUNNER=0" in text and "\n" not in text


def test_every_module_of_the_runner_imports() -> None:
    package = importlib.import_module("vllm.v1.worker.gpu")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, "vllm.v1.worker.gpu.")]
    assert len(names) > 50
    for name in names:
        importlib.import_module(name)


def test_every_kernel_of_this_vllm_is_replaced() -> None:
    from vllm.triton_utils.dispatcher import KernelOverride

    runner_v2.provide_torch_kernels()
    runner_v2.register_torch_kernels()
    for kernel in registry.KERNELS:
        module, _, name = kernel.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), KernelOverride), kernel


class Library:
    """Has any attribute, as llvmlite's has, which numba imports."""

    def __getattribute__(self, name: str) -> Any:
        return object()


def test_kernels_are_found_beside_objects_without_attributes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.triton_utils.dispatcher import KernelOverride, _rebind_kernels

    def kernel(output_ptr: Any) -> None:
        pass

    runner_v2.provide_torch_kernels()
    owner = types.SimpleNamespace(kernel=kernel)
    holder: Any = types.ModuleType("holder")
    vars(holder).update(library=Library(), kernel=kernel, owner=owner)
    monkeypatch.setitem(sys.modules, "holder", holder)
    override = KernelOverride(kernel, kernel)
    _rebind_kernels([(kernel, override)])
    assert holder.kernel is owner.kernel is override


def depth(function: Any) -> int:
    """How often a function is wrapped."""
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0


def test_registering_again_wraps_nothing_again() -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import KernelOverride

    def wrapped() -> list[Any]:
        hook = type(current_platform).register_triton_kernel_overrides.__func__
        return [triton.jit, KernelOverride.__getitem__, hook]

    deepinfer_vllm.register()
    first = wrapped()
    deepinfer_vllm.register()
    assert wrapped() == first
    assert [depth(function) for function in first] == [1, 1, 1]
