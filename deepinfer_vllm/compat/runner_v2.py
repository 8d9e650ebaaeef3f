"""Runner V2 where there is no Triton: our kernels in place of Triton's, and a clear word where one is missing."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any


def provide_torch_kernels() -> None:
    """Let runner V2 run on CPU without Triton. Does nothing where vLLM has Triton, or on another platform."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON or not current_platform.is_cpu():
        return
    _complete_placeholder()
    _allow_v2()
    _pass_grids()
    _look_into_dicts_alone()
    _extend_overrides(type(current_platform))


def _complete_placeholder() -> None:
    """Give vLLM's stand-in for the `triton` module what V2's launch code computes with it, and let it name kernels.

    A kernel it decorates is a plain function otherwise, and its launch says "'function' object is not subscriptable".
    """
    from vllm.triton_utils import triton

    if hasattr(triton, "deepinfer_names_kernels"):
        return
    triton.deepinfer_names_kernels = True
    if not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    jit = triton.jit

    @functools.wraps(jit)
    def naming_jit(*args: Any, **kwargs: Any) -> Any:
        decorated = jit(*args, **kwargs)
        if args and callable(args[0]):
            return UnlaunchableKernel(decorated)
        return lambda function: UnlaunchableKernel(decorated(function))

    triton.jit = naming_jit


class UnlaunchableKernel:
    """A Triton kernel where there is no Triton: it can be looked at, replaced, and not launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.func = function
        self.arg_names = tuple(inspect.signature(function).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"Triton kernel {self.func.__module__}.{self.func.__qualname__} is needed, but there is no Triton here and "
            "no PyTorch version of it in deepinfer_vllm.torch_kernels. Leave out the option that needs it, or set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )

    def __getitem__(self, grid: Any) -> Any:
        return self


def _allow_v2() -> None:
    """Lift vLLM 0.32's refusal of V2 without Triton; its other checks stay."""
    from vllm.config import VllmConfig

    module: Any = sys.modules[VllmConfig.__module__]
    validate = getattr(VllmConfig, "_validate_v2_model_runner", None)
    if validate is None or hasattr(validate, "__wrapped__"):
        return

    @functools.wraps(validate)
    def validate_as_if_triton(self: Any) -> None:
        known, module.HAS_TRITON = module.HAS_TRITON, True
        try:
            validate(self)
        finally:
            module.HAS_TRITON = known

    VllmConfig._validate_v2_model_runner = validate_as_if_triton


def _pass_grids() -> None:
    """Hand the launch grid to the overrides that ask for it (`registry.takes_grid`); vLLM's registry drops it."""
    from vllm.triton_utils.dispatcher import KernelOverride

    choose = KernelOverride.__getitem__
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def choose_with_grid(self: Any, grid: Any) -> Any:
        if getattr(self._impl, "takes_grid", False):
            return functools.partial(self._impl, grid)
        return choose(self, grid)

    KernelOverride.__getitem__ = choose_with_grid


def _look_into_dicts_alone() -> None:
    """Let vLLM's search for kernels pass objects by whose `__dict__` is none; 0.32 and 0.33 fail there.

    It looks at whatever a module holds. llvmlite's library, which is there once numba has been imported, makes a
    function of any name it is asked for, `__dict__` too: no engine started in that process.
    """
    from vllm.triton_utils import dispatcher

    def attributes(value: Any) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return {}
        return found

    dispatcher.vars = attributes


def _extend_overrides(platform: Any) -> None:
    """Add ours to what the platform registers as a worker starts; only then are kernels imported."""
    register = platform.register_triton_kernel_overrides.__func__
    if hasattr(register, "deepinfer_kernels"):
        return

    @functools.wraps(register)
    def register_all(cls: Any) -> None:
        register(cls)
        register_torch_kernels()

    register_all.deepinfer_kernels = True  # type: ignore[attr-defined]
    platform.register_triton_kernel_overrides = classmethod(register_all)


def register_torch_kernels() -> None:
    """Register every function of `deepinfer_vllm.torch_kernels` that fits this vLLM's kernel."""
    import importlib

    from vllm.triton_utils.dispatcher import _registry, register_kernels

    from deepinfer_vllm.torch_kernels import registry

    overrides = {}
    for kernel, target in registry.KERNELS.items():
        module, _, name = kernel.rpartition(".")
        original = getattr(importlib.import_module(module), name, None)
        function = registry.load(target)
        if kernel in _registry or original is None:
            continue
        if registry.fits(_parameters(original), function):
            overrides[kernel] = registry.bound(function, _parameters(original))
    register_kernels(overrides)


def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(getattr(kernel, "arg_names", None) or inspect.signature(kernel).parameters)
