"""`vllm serve` over the store: a conversation goes on after a restart, and what was found is seen where users look."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, V41_FLAGS, ServerProcess
from serving.client import MODEL, NO_THINKING, Api
from serving.conftest import START_LIMIT_SECONDS
from serving.test_prefix_cache import counter

QUESTION = " ".join(f"Item {i} of the list is {i * 37 % 101}." for i in range(60))


@contextmanager
def server_on(checkpoint: Path, root: Path) -> Iterator[Api]:
    """What a user writes, and sizes for a small machine. The engine is a process of its own."""
    extra = {"root": str(root), "capacity_bytes": 1 << 28, "slab_bytes": 1 << 24, "index_dir": str(root / "index")}
    extra |= {"cpu_bytes_to_use": 1 << 26, "swa_bytes": 1 << 24}
    transfer = {"kv_connector": "DeepInfer3FSConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    flags = (
        "--served-model-name",
        MODEL,
        "--enable-prompt-tokens-details",
        "--kv-transfer-config",
        json.dumps(transfer),
    )
    environment = {**SMALL_CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = root / "server.log"
    with ServerProcess(checkpoint, log, (*V41_FLAGS, *SMALL_CPU_FLAGS, *flags), environment) as process:
        process.wait_until_healthy(START_LIMIT_SECONDS)
        with httpx.Client(base_url=process.url, timeout=120) as http:
            yield Api(http)


def chat(api: Api, *turns: str) -> tuple[str, int]:
    """The answer to a conversation, and how many tokens of it were found."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
    answered = api.post(
        "/v1/chat/completions", messages=messages, max_tokens=64, ignore_eos=True, chat_template_kwargs=NO_THINKING
    )
    details = answered["usage"]["prompt_tokens_details"] or {}
    return answered["choices"][0]["message"]["content"], details.get("cached_tokens") or 0


def test_a_conversation_outlives_its_server(checkpoint: Path, tmp_path: Path) -> None:
    with server_on(checkpoint, tmp_path) as api:
        first, found = chat(api, QUESTION)
        assert found == 0
        second, found = chat(api, QUESTION, first, "And then?")
        assert found >= 256
        assert counter(api, "vllm:deepinfer_kv_store_bytes_total") > 0
        assert 'event="stored"' in api.http.get("/metrics").text  # a snapshot of the first turn
    with server_on(checkpoint, tmp_path) as api:
        assert chat(api, QUESTION, first, "And then?") == (second, pytest.approx(found, abs=128))
        assert counter(api, "vllm:deepinfer_kv_hit_tokens_total") >= 256
        assert counter(api, "vllm:deepinfer_kv_load_bytes_total") > 0
        assert counter(api, "vllm:deepinfer_kv_used_bytes") > 0
