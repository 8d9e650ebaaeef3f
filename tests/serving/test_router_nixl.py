"""The router before real engines that prefill and decode apart over NIXL, with its TCP on loopback.

Needs nixl, which is not installed by default: `make nixl`.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, ServerProcess, free_port
from engine.llama import write_llama
from serving.client import MODEL, Api
from serving.conftest import START_LIMIT_SECONDS
from serving.router_thread import Router
from serving.test_prefix_cache import counter
from serving.test_router_engines import asked, prompts

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: make nixl")
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ENVIRONMENT = {
    **SMALL_CPU_ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of one that prefills and one that decodes."""
    directory = tmp_path_factory.mktemp("nixl")
    checkpoint = write_llama(directory / "llama")
    flags = (*SMALL_CPU_FLAGS, *("--max-model-len", "1024"), *("--served-model-name", MODEL))
    flags += ("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(TRANSFER))
    processes = []
    with ExitStack() as stack:
        for number in range(2):
            environment = {**ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            log = directory / f"engine-{number}.log"
            processes.append(stack.enter_context(ServerProcess(checkpoint, log, flags, environment)))
        for process in processes:
            process.wait_until_healthy(2 * START_LIMIT_SECONDS)
        yield [process.url for process in processes]


def count(url: str, name: str) -> float:
    with httpx.Client(base_url=url, timeout=60) as http:
        return counter(Api(http), name)


@pytest.mark.parametrize("stream", [False, True])
def test_two_engines_say_what_one_would(engines: list[str], stream: bool) -> None:
    """The decode engine reads every token of the prompt but what it computes itself; the prefill engine keeps none."""
    prefill, decode = engines
    listed = [
        {"url": prefill, "roles": ["prefill"], "id": "prefill"},
        {"url": decode, "roles": ["decode"], "id": "decode"},
    ]
    split = {"connector": "nixl", "local_tokens": 64}
    read = count(decode, "vllm:external_prefix_cache_hits_total")
    fields = [asked(prompt, max_tokens=8, stream=stream) for prompt in prompts(4)[2 * stream : 2 * stream + 2]]
    with Router(listed, disaggregation=split) as router:
        told = [said(router.url, each) for each in fields]
        assert router.call(router.left()) == 0
    assert told == [said(prefill, each) for each in fields]
    tokens = sum(len(each["prompt"]) for each in fields)
    assert count(decode, "vllm:external_prefix_cache_hits_total") - read >= tokens - 16 * len(fields)
    assert count(prefill, "vllm:nixl_num_kv_expired_reqs_total") == 0


def said(url: str, fields: dict[str, Any]) -> str:
    """The answer's text."""
    answer = httpx.post(f"{url}/v1/completions", json=fields, timeout=300)
    assert answer.status_code == 200, answer.text
    if not fields["stream"]:
        return str(answer.json()["choices"][0]["text"])
    assert answer.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])
