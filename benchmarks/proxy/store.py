"""The router with a real daemon of the store: what CHECK adds to prompts of 16,384 tokens, all of them stored."""

from __future__ import annotations

import contextlib
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from kv import checks

from proxy import contenders
from proxy.contenders import Running
from proxy.tools import engines, load, request

TOKENS = 16_384
BLOCK = 64
KEYS = 20_000
A_SECOND = 20.0
_HITS = re.compile(r"^deepinfer_router_check_hit_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@contextlib.contextmanager
def daemon(scratch: Path) -> Iterator[tuple[str, list[int]]]:
    """The router's section `store` for it, and a prompt that is stored."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    (directory / "root").mkdir()
    prompt = checks.prompt(TOKENS)
    store = checks.Store(directory / "root", BLOCK, [prompt], KEYS)
    with checks.daemon(directory / "root", directory, KEYS) as (socket, _):
        yield f"store:\n  socket: {socket}\n  namespaces: {{mock: {store.descriptor.directory}}}\n", prompt


def recipe(scratch: Path) -> str:
    """The router's section `entry` that encodes conversations, with the tokenizer of a tiny V4.1."""
    from deepinfer_vllm.checkpoint.create import create

    tokenizer = create(scratch / "tiny").directory / "tokenizer.json"
    return f"entry:\n  encoding: recipe\n  recipe:\n    tokenizer: {tokenizer}\n"


def check_ms(scratch: Path, rounds: int, seconds: float, say: Callable[[str], None]) -> list[float]:
    """Of each round, milliseconds that CHECK adds to the median time of a request. Raises RuntimeError: no hits."""
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(engines(2, scratch))
        section, prompt = stack.enter_context(daemon(scratch))
        settings = ["--engines", ",".join(urls)]
        without = stack.enter_context(contenders.ours(scratch, "without", settings))
        asking = stack.enter_context(contenders.ours(scratch, "asking", settings, section))
        body = request({"model": "mock", "prompt": prompt, "max_tokens": 16}, "/v1/completions")
        added = []
        for number in range(rounds):
            say(f"CHECK of {TOKENS} tokens: round {number + 1}")
            times = {}
            for running in (without, asking) if number % 2 else (asking, without):
                taken = load(running.port, body, scratch, connections=1, seconds=seconds, rate=A_SECOND)
                times[running] = taken.load["time_us"][0] / 1e3
            added.append(times[asking] - times[without])
        if not _hits(asking):
            raise RuntimeError("the store had nothing of a prompt that is stored")
    return added


def _hits(running: Running) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{running.admin_port}/metrics", timeout=10) as answer:
        return sum(map(float, _HITS.findall(answer.read().decode())))
