"""Engines in this process, one at a time, on the golden checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from engine.harness import GOLDEN, Engine


@pytest.fixture
def engine() -> Engine:
    """engine(name, numerics="plain", **engine_args): vLLM's LLM on a golden checkpoint, float32."""

    @contextmanager
    def start(name: str, numerics: str = "plain", **engine_args: Any) -> Iterator[EngineBackend]:
        backend = EngineBackend(GOLDEN / name, engine_args.pop("dtype", "float32"), numerics, **engine_args)
        try:
            yield backend
        finally:
            backend.close()

    return start
