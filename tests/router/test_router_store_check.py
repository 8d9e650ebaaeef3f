"""CHECK at the entry, with the store's own server: there, absent, slow, hung, killed."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import orjson
import pytest
from exchanges import received
from recipe_case import recipe_entry, write_tokenizer

from check_case import UNIT, daemon, namespace, store_prompt, storing
from deepinfer_kvstore.daemon import Address
from deepinfer_kvstore.extra_keys import ExtraKeys, Lora
from deepinfer_router import store_check
from deepinfer_router.entry import Entry
from deepinfer_router.entry_config import Adapter, EntryConfig
from deepinfer_router.identity_config import Grant, IdentityConfig
from deepinfer_router.request import Request
from deepinfer_router.store_config import StoreConfig

TOKENS = list(range(10 * UNIT + 3))


def make_entry(path: Path, grant: Grant | None = None, **config: Any) -> Entry:
    where = {"socket": path / "check.sock", "budget_s": 1.0, "namespaces": {"m": namespace().directory}, **config}
    adapters = {"mine": Adapter(model="m", path="/mine")}
    return Entry(EntryConfig(adapters=adapters), IdentityConfig(everybody=grant or Grant()), StoreConfig(**where))


async def ask(entry: Entry, model: str = "m", prompt: Any = TOKENS, **headers: str) -> Request:
    request = entry.read(received("/v1/completions", {"model": model, "prompt": prompt}, **headers))
    await entry.prepare(request)
    request.release()
    return request


def asked(path: Path, *models: str, **options: Any) -> list[Request]:
    """Requests one after the other through one entry."""

    async def run() -> list[Request]:
        entry = make_entry(path, **options)
        try:
            return [await ask(entry, model) for model in models or ("m",)]
        finally:
            await entry.close()

    return asyncio.run(run())


def counted(result: str) -> float:
    return store_check.CHECKS.labels(result).value


def test_finds_what_is_stored(tmp_path: Path) -> None:
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, TOKENS[: 6 * UNIT])
        before = counted("answered")
        (request,) = asked(tmp_path, grant=Grant(tenant="t"))
    assert (request.work.hit_tokens, request.work.uncached_tokens) == (6 * UNIT, len(TOKENS) - 6 * UNIT)
    assert counted("answered") == before + 1
    told = orjson.loads(request.body())["kv_transfer_params"]["kvstore"]
    assert told == {"tenant": "t", "ticket": request.ticket.hex()}
    assert request.ticket


def test_a_daemon_elsewhere_is_asked_over_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a token long enough"
    monkeypatch.setenv("STORE_TOKEN", token)
    with storing(tmp_path) as store, daemon(tmp_path, listen=Address("127.0.0.1", 0, token, None)) as running:
        where = {"socket": None, "address": f"127.0.0.1:{running.tcp_port}", "token_env": "STORE_TOKEN"}
        store_prompt(store, TOKENS[: 6 * UNIT])
        assert asked(tmp_path, **where)[0].work.hit_tokens == 6 * UNIT
        monkeypatch.setenv("STORE_TOKEN", "another token, as long")
        assert asked(tmp_path, **where)[0].work.hit_tokens == 0


def test_salt_and_adapter_are_part_of_the_key(tmp_path: Path) -> None:
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, TOKENS, ExtraKeys(salt="s"))
        store_prompt(store, TOKENS[: 2 * UNIT], ExtraKeys(lora=Lora("mine", "/mine")))
        hits = [asked(tmp_path, grant=Grant(cache_salt=salt))[0].work.hit_tokens for salt in ("s", "other", None)]
        assert hits == [10 * UNIT, 0, 0]
        assert asked(tmp_path, "mine")[0].work.hit_tokens == 2 * UNIT


def test_keys_that_differ_are_seen_in_the_counts(root: Path, tmp_path: Path) -> None:
    """LMCache#2511, vllm#51875, DingoCache#77: engines and router whose keys differ get no error, and no hit ever.

    Hash seeds are part of a namespace's name; what can still differ is a salt. The alert asks for these two counters.
    """
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, TOKENS, ExtraKeys(salt="the engine's"))
        counters = (store_check.CHECKED_TOKENS.labels(), store_check.HIT_TOKENS.labels())
        before = [counter.value for counter in counters]
        (request,) = asked(tmp_path, grant=Grant(cache_salt="the router's"))
        grown = [counter.value - old for counter, old in zip(counters, before, strict=True)]
    assert (request.work.hit_tokens, grown) == (0, [len(TOKENS), 0])
    (rule,) = re.findall("alert: NoStoreHits.*?for:", (root / "deploy/router-alerts.yaml").read_text(), re.DOTALL)
    assert "checked_tokens_total[30m]) > 1000" in rule and "check_hit_tokens_total[30m]) == 0" in rule


def test_conversations_go_on(tmp_path: Path) -> None:
    async def run(path: Path) -> list[int]:
        entry = make_entry(path)
        found = [await ask(entry, prompt=TOKENS[:end], x_session_id="s") for end in (4 * UNIT, 8 * UNIT, 10 * UNIT)]
        await entry.close()
        return [request.work.hit_tokens for request in found]

    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, TOKENS)
        assert asyncio.run(run(tmp_path)) == [4 * UNIT, 8 * UNIT, 10 * UNIT]


def test_a_model_without_a_namespace_has_the_only_one(tmp_path: Path) -> None:
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, TOKENS)
        assert asked(tmp_path, "other")[0].work.hit_tokens == 10 * UNIT


def test_conversations_that_are_encoded_here_are_asked_for(tmp_path: Path) -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "Hello, " * 40}]}

    async def run(store: Any) -> Request:
        config = StoreConfig(socket=tmp_path / "check.sock", budget_s=1.0, namespaces={"m": namespace().directory})
        entry = recipe_entry(write_tokenizer(tmp_path), store=config)
        requests = [entry.read(received("/v1/chat/completions", fields)) for _ in range(2)]
        await entry.prepare(requests[0])
        assert requests[0].token_ids
        await asyncio.to_thread(store_prompt, store, requests[0].token_ids)
        await entry.prepare(requests[1])
        await entry.close()
        return requests[1]

    with storing(tmp_path) as store, daemon(tmp_path):
        request = asyncio.run(run(store))
    assert request.token_ids and request.work.hit_tokens == len(request.token_ids) // UNIT * UNIT
    params = orjson.loads(request.body())["kv_transfer_params"]
    assert params == {"kvstore": {"ticket": request.ticket.hex()}, "prompt_token_ids": request.token_ids}


def test_what_the_store_does_not_know(tmp_path: Path) -> None:
    with daemon(tmp_path):
        before = counted("namespace")
        (request,) = asked(tmp_path, "other")
        assert (request.work.hit_tokens, request.ticket) == (0, b"")
        assert counted("namespace") == before + 1


def test_text_is_not_asked_for(tmp_path: Path) -> None:
    async def run() -> Request:
        entry = make_entry(tmp_path)
        request = await ask(entry, prompt="text")
        await entry.close()
        return request

    before = counted("no_token_ids")
    assert asyncio.run(run()).work.hit_tokens == 0
    assert counted("no_token_ids") == before + 1


def test_prompts_with_media_are_not_asked_for(tmp_path: Path) -> None:
    """Their hashes cover the media: without them another prompt's blocks would be found."""

    async def run() -> Request:
        entry = make_entry(tmp_path)
        fields = {"model": "m", "token_ids": TOKENS, "features": {"mm_hashes": {"image": ["a"]}}}
        request = entry.read(received("/inference/v1/generate", fields))
        await entry.prepare(request)
        await entry.close()
        return request

    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, TOKENS)
        before = counted("media")
        assert asyncio.run(run()).work.hit_tokens == 0
        assert counted("media") == before + 1


def test_token_ids_that_are_none_are_the_engines_to_refuse(tmp_path: Path) -> None:
    async def run(path: Path) -> Request:
        entry = make_entry(path)
        request = await ask(entry, prompt=[1, "a", -5])
        await entry.close()
        return request

    with storing(tmp_path), daemon(tmp_path):
        before = counted("bad_token_ids")
        assert asyncio.run(run(tmp_path)).token_ids == [1, "a", -5]
        assert counted("bad_token_ids") == before + 1


def test_an_absent_store_is_left_alone(tmp_path: Path) -> None:
    """NVIDIA dynamo#10580: a router that waits for its index serves nobody."""
    down, unreachable = counted("store_is_down"), counted("unreachable")
    requests = asked(tmp_path, *["m"] * (store_check.FAILURES + 5))
    assert all(request.work.hit_tokens == 0 for request in requests)
    assert counted("unreachable") - unreachable == store_check.FAILURES
    assert counted("store_is_down") - down == 5


@contextmanager
def silent_server(path: Path) -> Iterator[list[socket.socket]]:
    """Accepts, and says nothing."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    accepted: list[socket.socket] = []

    def accept() -> None:
        try:
            while True:
                accepted.append(listener.accept()[0])
        except OSError:
            return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield accepted
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        for one in accepted:
            one.close()


def test_a_hung_store_costs_its_budget_a_few_times(tmp_path: Path) -> None:
    with silent_server(tmp_path / "check.sock") as accepted:
        timeouts, down = counted("timeout") + counted("unreachable"), counted("store_is_down")
        asked(tmp_path, *["m"] * 50, budget_s=0.05)
        assert accepted
    assert counted("timeout") + counted("unreachable") - timeouts >= store_check.FAILURES
    assert counted("store_is_down") - down >= 30


async def until(entry: Entry, hit: int) -> None:
    """Ask until it is answered so."""
    end = monotonic() + 60
    while (await ask(entry)).work.hit_tokens != hit:
        assert monotonic() < end
        await asyncio.sleep(0.01)


def test_a_store_that_ends_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_check, "PAUSE_SECONDS", 0.05)

    async def run() -> None:
        entry = make_entry(tmp_path)
        serving = daemon(tmp_path)
        await asyncio.to_thread(serving.__enter__)
        await until(entry, 10 * UNIT)
        await asyncio.to_thread(serving.__exit__, None, None, None)
        await until(entry, 0)
        with daemon(tmp_path):
            await until(entry, 10 * UNIT)
        await entry.close()

    with storing(tmp_path) as store:
        store_prompt(store, TOKENS)
        asyncio.run(run())


@contextmanager
def daemon_process(path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "deepinfer_vllm.cli.main", "kvstore", "--root", str(path / "root")]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    sockets = ["--socket", str(path / "check.sock"), "--index-dir", str(path / "index")]
    process = subprocess.Popen([*command, *sockets], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout and "1 namespaces" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_daemon_that_stands_still_and_one_that_is_killed(tmp_path: Path) -> None:
    async def run(process: "subprocess.Popen[str]") -> None:
        entry = make_entry(tmp_path, budget_s=0.2)
        await until(entry, 10 * UNIT)
        process.send_signal(signal.SIGSTOP)
        await until(entry, 0)
        process.send_signal(signal.SIGCONT)
        await until(entry, 10 * UNIT)
        process.kill()
        await until(entry, 0)
        with daemon(tmp_path):
            await until(entry, 10 * UNIT)
        await entry.close()

    with storing(tmp_path) as store:
        store_prompt(store, TOKENS)
        with daemon_process(tmp_path) as process:
            asyncio.run(run(process))


def test_a_client_that_leaves_ends_the_probe(tmp_path: Path) -> None:
    """A probe that nobody ended would keep the breaker open for ever."""

    async def run() -> None:
        entry = make_entry(tmp_path, budget_s=1.0)
        task = asyncio.create_task(ask(entry))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(store_check.FAILURES):
            await ask(entry)
        await entry.close()

    with silent_server(tmp_path / "check.sock"):
        down = counted("store_is_down")
        asyncio.run(run())
        assert counted("store_is_down") - down >= 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "one of socket and address"),
        ({"socket": "/s", "address": "h:1"}, "one of socket and address"),
        ({"address": "h"}, "HOST:PORT"),
        ({"socket": "/s", "budget_s": 0}, "budget_s"),
    ],
)
def test_configuration(config: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StoreConfig(**config)
