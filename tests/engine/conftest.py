"""Engines in this process, one at a time, on the golden checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.training.shipped import write_trained
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


@pytest.fixture(scope="module")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained pair in float32, with its tokenizer."""
    directory = tmp_path_factory.mktemp("trained") / "pair"
    write_trained(directory, dtype="float32")
    return directory
