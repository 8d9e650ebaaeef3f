"""CHECK, asked before an engine is, against what the engine's connector then finds."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer_kvstore.check import Checker
from deepinfer_kvstore.extra_keys import ExtraKeys
from deepinfer_kvstore.metrics import Metrics
from deepinfer_kvstore.namespaces import Namespaces
from deepinfer_kvstore.protocol import CheckReply, CheckRequest
from deepinfer_vllm.checkpoint.backends import EngineBackend
from engine.harness import GOLDEN
from engine.kvstore import engine_on, finish_stores, forget
from engine.llama import write_llama


@contextmanager
def checker(root: Path) -> Iterator[Checker]:
    """CHECK in this process, over the engine's own index."""
    namespaces = Namespaces(root, root.with_name(f"{root.name}-index"))
    namespaces.scan()
    for namespace in namespaces.all():
        namespace.sync()
    yield Checker(namespaces, Metrics())
    namespaces.close()


def found_by(backend: EngineBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the connector answers from now on, last the latest."""
    answers: list[int] = []
    connector = backend.scheduler.connector
    ask = connector.get_num_new_matched_tokens

    def record(*arguments: Any) -> tuple[int | None, bool]:
        tokens, later = ask(*arguments)
        answers.append(tokens or 0)
        return tokens, later

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", record)
    return answers


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama", {}),
        ("v41", {"replay": False, "block_size": 32}),
        ("v41", {"replay": True, "block_size": 64}),
    ],
)
def test_says_beforehand_what_the_engine_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, arguments: dict[str, Any]
) -> None:
    """vllm#52735: what is stored and what is hit are told by one rule. LMCache#1690: lookup hit, retrieve 0."""
    checkpoint = write_llama(tmp_path / "llama") if model == "llama" else GOLDEN / "v41-tiny-a"
    rng = random.Random(0)
    stored = [rng.randrange(3, 250) for _ in range(400)]
    lengths = (399, 401, 256, 257, 320, 130, 64, 63, 33, 32, 31, 5)
    prompts = [(stored + [7] * 50)[:length] for length in lengths] + [stored[:200] + [9] * 100, stored[1:], [5] * 300]
    with engine_on(checkpoint, tmp_path / "root", kv_cache_memory_bytes=64 << 20, **arguments) as backend:
        backend.generate(stored, 2)
        backend.generate(stored[:321], 2)
        forget(backend)
        found = found_by(backend, monkeypatch)
        hits = 0
        with checker(tmp_path / "root") as checking:
            (namespace,) = checking.namespaces.all()
            for prompt in prompts:
                ids = b"".join(token.to_bytes(4, "little") for token in prompt)
                reply = checking.check(CheckRequest(namespace.name, tokens=ids))
                backend.generate(prompt, 1)
                whole = found[-1] == len(prompt) - 1 and len(prompt) % namespace.descriptor.hash_tokens == 0
                assert reply.hit_tokens == (len(prompt) if whole else found[-1]), len(prompt)
                assert (reply.load_bytes > 0) == (reply.hit_tokens > 0)
                hits += reply.hit_tokens > 0
                forget(backend)
                assert namespace.sync() is not None
            assert hits >= 5
            salted = CheckRequest(
                namespace.name, tokens=b"".join(t.to_bytes(4, "little") for t in stored), extra=ExtraKeys("s")
            )
            assert checking.check(salted) == CheckReply(0, 0, "none")
        finish_stores(backend)
