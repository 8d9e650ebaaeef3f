"""The server that the tests of this package share. It is started once, and must still be healthy at the end."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.server_process import SMALL_CPU_FLAGS, V41_FLAGS, ServerProcess
from serving.client import MODEL, Api

START_LIMIT_SECONDS = 240


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny V4.1 of random weights."""
    return create(tmp_path_factory.mktemp("serving") / "tiny").directory


@pytest.fixture(scope="package")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture(scope="package")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    flags = (*V41_FLAGS, *SMALL_CPU_FLAGS, "--served-model-name", MODEL)
    with ServerProcess(checkpoint, checkpoint.parent / "server.log", flags) as process:
        process.wait_until_healthy(START_LIMIT_SECONDS)
        yield process
        assert process.is_healthy(), f"a test has brought the server down: {process.log_text()[-4000:]}"


@pytest.fixture(scope="package")
def api(server: ServerProcess) -> Iterator[Api]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        yield Api(http)
