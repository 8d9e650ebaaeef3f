"""The router before real engines that prefill and decode apart, through the store: they say what one would."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from deepinfer_router.resuming import RESUMES
from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, ServerProcess
from engine.harness import golden_prompts
from engine.llama import write_llama
from serving.client import MODEL, Api
from serving.conftest import START_LIMIT_SECONDS
from serving.router_thread import Router
from serving.test_prefix_cache import counter

ANSWER_TOKENS = 300
SETTINGS: dict[str, Any] = {
    "disaggregation": {"connector": "store", "local_tokens": 64},
    "failure": {"resume": True, "stall_s": 60},
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Engines:
    """Two that prefill and two that decode, on one store."""

    def __init__(self, processes: list[ServerProcess]) -> None:
        self.processes = processes

    def listed(self) -> list[dict[str, Any]]:
        roles = ["prefill", "prefill", "decode", "decode"]
        return [
            {"url": process.url, "roles": [role], "id": f"{role}-{number}"}
            for number, (process, role) in enumerate(zip(self.processes, roles, strict=True))
        ]

    def count(self, number: int, name: str) -> float:
        with httpx.Client(base_url=self.processes[number].url, timeout=60) as http:
            return counter(Api(http), name)

    def kill(self, number: int) -> None:
        process = self.processes[number]._process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("router")
    checkpoint, root = write_llama(directory / "llama"), directory / "root"
    root.mkdir()
    (directory / "template.jinja").write_text(TEMPLATE)
    extra = {"root": str(root), "capacity_bytes": 1 << 28, "slab_bytes": 1 << 24, "index_dir": str(directory / "index")}
    extra |= {"cpu_bytes_to_use": 1 << 26, "pd_wait_s": 60}
    processes = []
    with ExitStack() as stack:
        for number, role in enumerate(("kv_producer", "kv_producer", "kv_consumer", "kv_consumer")):
            transfer = {"kv_connector": "DeepInfer3FSConnector", "kv_role": role, "kv_connector_extra_config": extra}
            flags = (
                *SMALL_CPU_FLAGS,
                *("--max-model-len", "1024"),
                *("--served-model-name", MODEL),
                *("--chat-template", str(directory / "template.jinja")),
                "--enable-prompt-tokens-details",
                *("--kv-transfer-config", json.dumps(transfer)),
            )
            environment = {**SMALL_CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
            log = directory / f"engine-{number}.log"
            processes.append(stack.enter_context(ServerProcess(checkpoint, log, flags, environment)))
        for process in processes:
            process.wait_until_healthy(2 * START_LIMIT_SECONDS)
        yield Engines(processes)


def prompts(count: int) -> list[list[int]]:
    """Each of another beginning, so that none shares blocks with another."""
    ids = golden_prompts("v41-tiny-a")[4].input_ids.tolist()[:200]
    return [[3 + number, *ids] for number in range(count)]


def asked(prompt: list[int], **more: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": ANSWER_TOKENS}
    return fields | more


class Told:
    """What a client has of a stream so far."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.usage: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None
        self.done = False

    async def take(self, http: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> "Told":
        body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200, (await answer.aread())[:500]
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        self._event(line.removeprefix("data: "))
        except httpx.RemoteProtocolError:
            assert self.error is not None, "a stream was cut short without an error event"
        return self

    def _event(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        self.error = event.get("error")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.ids += choice.get("token_ids") or []


def test_two_engines_say_what_one_would(engines: Engines) -> None:
    with httpx.Client(base_url=engines.processes[3].url, timeout=120) as http:
        alone = [Api(http).post("/v1/completions", **asked(prompt, max_tokens=40)) for prompt in prompts(6)]
    with Router(engines.listed(), **SETTINGS) as router, httpx.Client(base_url=router.url, timeout=120) as http:
        for prompt, one in zip(prompts(6), alone, strict=True):
            # Once in the store, a prompt of whole blocks is found by the decode engine too.
            answer = Api(http).post("/v1/completions", **asked(prompt, max_tokens=40))
            assert answer["choices"][0]["text"] == one["choices"][0]["text"]
            assert answer["usage"]["completion_tokens"] == 40
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # the prefill's, which computed all
        assert router.call(router.left()) == 0
    computed = sum(engines.count(number, "vllm:prompt_tokens_total") for number in (0, 1))
    assert computed == sum(map(len, prompts(6)))
    assert engines.count(2, "vllm:deepinfer_kv_hit_tokens_total") >= 192


def test_killed_engines_cost_no_stream_that_can_be_resumed(engines: Engines) -> None:
    load = [("/v1/completions", asked(prompt)) for prompt in prompts(12)[6:]]
    words = "Item 7 of the list is 42, and item 8 is not. " * 4
    load += [("/v1/chat/completions", chat_of(f"{number} {words}")) for number in range(6)]
    fixed = [("/v1/completions", asked(prompt, seed=1)) for prompt in prompts(16)[12:]]

    async def reference() -> list[Told]:
        async with httpx.AsyncClient(base_url=engines.processes[3].url, timeout=300) as http:
            return await asyncio.gather(*(Told().take(http, path, fields) for path, fields in load + fixed))

    alone = asyncio.run(reference())
    before = {outcome: RESUMES.labels(outcome).value for outcome in ("resumed", "seed")}

    async def under_fire(url: str) -> list[Told]:
        tolds = [Told() for _ in load + fixed]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            tasks = [
                asyncio.create_task(told.take(http, path, fields))
                for told, (path, fields) in zip(tolds, load + fixed, strict=True)
            ]
            while sum(len(told.text) > 60 for told in tolds) < len(tolds) // 2:
                await asyncio.sleep(0.02)
                assert not all(task.done() for task in tasks), "the streams ended before an engine was killed"
            engines.kill(0)
            engines.kill(2)
            later = [Told().take(http, path, fields) for path, fields in load[:4]]
            await asyncio.gather(*tasks)
            tolds += await asyncio.gather(*later)
        return tolds

    with Router(engines.listed(), **SETTINGS) as router:
        tolds = asyncio.run(under_fire(router.url))
        assert router.call(router.left()) == 0
    resumable = tolds[: len(load)] + tolds[len(load + fixed) :]
    for told, one in zip(resumable, alone[: len(load)] + alone[:4], strict=True):
        assert told.error is None
        assert told.done
        assert told.text == one.text
        assert told.usage["completion_tokens"] == one.usage["completion_tokens"] == ANSWER_TOKENS
        assert told.usage["prompt_tokens"] == one.usage["prompt_tokens"]
    lost = 0
    for told, one in zip(tolds[len(load) : len(load + fixed)], alone[len(load) :], strict=True):
        if told.error is None:
            assert told.done
            assert told.text == one.text
        else:
            lost += 1
            assert told.error["code"] == "upstream_lost"
            assert not told.done
            assert one.text.startswith(told.text)
    assert RESUMES.labels("resumed").value - before["resumed"] >= 1
    assert RESUMES.labels("seed").value - before["seed"] == lost


def chat_of(text: str) -> dict[str, Any]:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True}
    # Random weights like special tokens, whose text an answer hides and /detokenize tells.
    return fields | {"max_tokens": ANSWER_TOKENS, "skip_special_tokens": False}
