"""The router before a real engine that encodes images and one that answers, through vLLM's own encoder-cache connector.

The encoder does whole requests too (`ec_both`): vLLM's `ec_producer` has no language model, which this V4.1 cannot do
without.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import copy

import httpx
import pytest

from deepinfer_router.encode import IMAGES
from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, V41_FLAGS, ServerProcess
from images import noise
from serving.client import MODEL, Api
from serving.conftest import START_LIMIT_SECONDS
from serving.router_thread import Router
from serving.test_images import ask

ENVIRONMENT = {**SMALL_CPU_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}  # for /reset_*
FIRST, SECOND = noise(90, 120, seed=1), noise(90, 120, seed=2)


class Split:
    """An encoder, an engine that prefills and decodes, and where the one leaves what the other loads."""

    def __init__(self, urls: list[str], storage: Path) -> None:
        self.engines = [
            {"url": urls[0], "roles": ["encode"], "id": "encoder"},
            {"url": urls[1], "roles": ["prefill", "decode"], "id": "answerer"},
        ]
        self.answerer = urls[1]
        self._storage = storage

    def stored(self) -> list[Path]:
        """Of each image that was encoded."""
        return sorted(self._storage.rglob("encoder_cache.safetensors"))

    def forget(self) -> None:
        """Nothing of what was asked before answers what is asked next."""
        for what in ("prefix", "encoder", "mm"):
            assert httpx.post(f"{self.answerer}/reset_{what}_cache", timeout=60).status_code == 200


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    directory = tmp_path_factory.mktemp("encoder")
    checkpoint, storage = create(directory / "tiny", vision=True).directory, directory / "storage"
    storage.mkdir()
    processes = []
    with ExitStack() as stack:
        for role in ("ec_both", "ec_consumer"):
            transfer = {
                "ec_connector": "ECExampleConnector",
                "ec_role": role,
                "ec_connector_extra_config": {"shared_storage_path": str(storage)},
            }
            flags = (*V41_FLAGS, *SMALL_CPU_FLAGS, "--served-model-name", MODEL)
            flags += ("--ec-transfer-config", json.dumps(transfer))
            log = directory / f"{role}.log"
            processes.append(stack.enter_context(ServerProcess(checkpoint, log, flags, ENVIRONMENT)))
        for process in processes:
            process.wait_until_healthy(2 * START_LIMIT_SECONDS)
        yield Split([process.url for process in processes], storage)


def test_the_answer_is_from_what_the_encoder_computed(split: Split) -> None:
    """The same as of one engine that encodes for itself; and another as soon as another image's encoding lies there."""
    with httpx.Client(base_url=split.answerer, timeout=120) as http:
        alone = [ask(Api(http), image) for image in (FIRST, SECOND)]
    assert alone[0] != alone[1] and split.stored() == []
    with Router(split.engines) as router, httpx.Client(base_url=router.url, timeout=120) as http:
        done = IMAGES.labels("done").value
        found, files = [], list[Path]()
        for image in (FIRST, SECOND):
            split.forget()
            found.append(ask(Api(http), image))
            files += set(split.stored()) - set(files)
        assert found == alone
        assert len(files) == 2 and IMAGES.labels("done").value == done + 2
        copy(files[0], files[1])
        split.forget()
        assert ask(Api(http), SECOND)[0] == alone[0][0]
        assert router.call(router.left()) == 0
