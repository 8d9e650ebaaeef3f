"""vLLM's EPLB on a CPU, which vLLM refuses: test shims, loaded into every process of an engine as a plugin of vLLM.

Each stands for something a CPU lacks or vLLM leaves out there: the refusal, the state its CPU runner V1 does not make,
and streams, on which it orders copies that on a CPU have happened already. V2 makes its state everywhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_vllm.compat.late import after_import

LB_STEPS = 16

_put: Callable[[Any, str, Any], None] = setattr
"""How a shim is set: for good in an engine's processes, and undone with its test in the tests' own."""


def install() -> None:
    """The plugin's entry point."""
    after_import("vllm.config.parallel", _accept)
    after_import("vllm.v1.worker.cpu_model_runner", _make_state)
    for name in ("eplb_state", "eplb_utils", "eplb_communicator", "async_worker"):
        after_import(f"vllm.distributed.eplb.{name}", _without_streams)
    after_import("vllm.distributed.eplb.eplb_state", _number_the_device)
    after_import("deepinfer_vllm.eplb.balancer", _shorten_windows)


class _AcceleratorLike:
    """The platform as the check of EPLB's configuration sees it."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def _accept(module: Any) -> None:
    if not isinstance(module.current_platform, _AcceleratorLike):
        _put(module, "current_platform", _AcceleratorLike(module.current_platform))


class _Stream:
    def __init__(self, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        """All there is has been done."""


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, *args: Any) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, stream: Any) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later._seconds - self._seconds)


class _Accelerator:
    current_stream = _Stream

    @staticmethod
    def set_stream(stream: Any) -> None:
        """There is one."""

    @staticmethod
    def set_device_index(index: int) -> None:
        """There is one."""

    @staticmethod
    def current_accelerator() -> None:
        """There is none."""


class _Torch:
    """torch, as EPLB sees it."""

    Event, Stream, accelerator = _Event, _Stream, _Accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _without_streams(module: Any) -> None:
    _put(module, "torch", _Torch())


def _number_the_device(module: Any) -> None:
    """The thread of asynchronous EPLB wants a number for its device."""
    start = module.EplbState.start_async_loop

    def number_and_start(self: Any, *args: Any, **kwargs: Any) -> None:
        self.device_index = 0
        start(self, *args, **kwargs)

    _put(module.EplbState, "start_async_loop", number_and_start)


def _shorten_windows(module: Any) -> None:
    """128 steps of an engine on a busy machine take longer than a test should."""
    _put(module, "LB_STEPS", LB_STEPS)


def _make_state(module: Any) -> None:
    load = module.CPUModelRunner.load_model
    if hasattr(load, "makes_eplb_state"):
        return

    def load_and_make_state(self: Any, load_dummy_weights: bool = False) -> None:
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.model_executor.models.interfaces import get_mixture_of_experts_model

        load(self, load_dummy_weights)
        if self.parallel_config.enable_eplb:
            self.eplb_state = EplbState(self.parallel_config, self.device)
            self._moe_model = get_mixture_of_experts_model(self.model)
            self.eplb_state.add_model(self._moe_model, self.model_config)
            self.eplb_state.start_async_loop()

    load_and_make_state.makes_eplb_state = True  # type: ignore[attr-defined]
    _put(module.CPUModelRunner, "load_model", load_and_make_state)


@contextmanager
def eplb_on_cpu(folder: Path) -> Iterator[None]:
    """The shims in those processes that this one starts, and in it until the end.

    `folder` gets what makes them a plugin of vLLM.
    """
    global _put
    metadata = folder / "cpu_eplb_shims-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu_eplb_shims\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu_eplb_shims = engine.cpu_eplb:install\n")
    tests = Path(__file__).resolve().parent.parent
    paths = os.pathsep.join([str(folder), str(tests), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setattr(sys, "path", [str(folder), *sys.path])
        _put = patch.setattr
        try:
            install()
            yield
        finally:
            _put = setattr
            of_ours = [f for f in sys.meta_path if getattr(getattr(f, "_change", None), "__module__", "") == __name__]
            for finder in of_ours:  # of modules that nobody has imported
                sys.meta_path.remove(finder)
