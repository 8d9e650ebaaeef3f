"""VLLM_BATCH_INVARIANT=1: the bits of a request's tokens and logprobs, whatever the engine does with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.native import invariance
from deepinfer_vllm.training.texts import text
from engine.harness import poison, preempt_all_every, preemptions
from engine.kvstore import engine_on, forget, tier_of
from engine.whims import whims

CHUNKS = (2048, 64, 17)
"""Tokens of a step: every prompt whole, and two ways to cut them."""

KINDS: dict[str, dict[str, Any]] = {
    "V1": {"runner": "V1"},
    "V2": {"runner": "V2"},
    "DSpark": {"runner": "V2", "speculative_config": {"method": "dspark", "num_speculative_tokens": 5}},
}
ENGINES = [(kind, dtype) for dtype in ("float32", "bfloat16") for kind in ("V2", "V1", "DSpark")]
SMALL = {"block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 8, "max_model_len": 448}
COUNT = 10

Asked = tuple[str, dict[str, Any]]
Answer = tuple[list[int], list[dict[int, float]]]
"""Tokens, and the logprobs of prompt and answer."""


@dataclass
class Case:
    """An engine, and what each request is answered alone, in one chunk, by the engine that does least."""

    kind: str
    backend: EngineBackend
    wanted: list[Answer]

    def scheduled(self, tokens: int) -> None:
        """At most so many tokens a step from now on."""
        self.backend.scheduler.max_num_scheduled_tokens = tokens

    def check(self, found: list[Answer], *where: Any) -> None:
        for number, (answer, wanted) in enumerate(zip(found, self.wanted, strict=True)):
            assert answer == wanted, (self.kind, where, number)

    def cached_tokens(self, salt: str) -> int:
        """Of the longest prompt."""
        return self.backend.cached_tokens({"prompt": texts()[-1], "cache_salt": salt})


@functools.cache
def texts() -> list[str]:
    return [text(name, 900)[:length] for name, length in (("code", 5), ("records", 90), ("prose", 170), ("lists", 330))]


def requests() -> list[Asked]:
    short, records, prose, lists = texts()
    return [
        (short, {"logprobs": 3}),
        (records, {"logprobs": 1}),
        (lists, {"logprobs": 2}),
        (prose, {"logprobs": 1, "prompt_logprobs": 1, "repetition_penalty": 1.2}),
        (records, {"logprobs": 1, "temperature": 0.7, "seed": 5}),
        (lists, {"logprobs": 1, "temperature": 1.0, "seed": 6, "top_p": 0.9, "top_k": 50}),
    ]


def ask(backend: EngineBackend, asked: list[Asked], salt: str) -> list[Answer]:
    """Together. What is cached and stored is found again under the same salt only."""
    from vllm import SamplingParams

    params = [SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, **p}) for _, p in asked]
    prompts = [{"prompt": prompt, "cache_salt": salt} for prompt, _ in asked]
    return [_answer(request) for request in backend._llm.generate(prompts, params, use_tqdm=False)]


def _answer(request: Any) -> Answer:
    output = request.outputs[0]
    rows = [row for row in request.prompt_logprobs or [] if row] + (output.logprobs or [])
    return list(output.token_ids), [{token: of.logprob for token, of in row.items()} for row in rows]


def alone(backend: EngineBackend, salt: str) -> list[Answer]:
    """One after the other."""
    return [answer for request in requests() for answer in ask(backend, [request], salt)]


def together(backend: EngineBackend, salt: str) -> list[Answer]:
    return ask(backend, requests(), salt)


@contextmanager
def started(checkpoint: Path, root: Path, kind: str, dtype: str) -> Iterator[EngineBackend]:
    options = {"skip_tokenizer_init": False, "logprobs_mode": "raw_logprobs"}
    with engine_on(checkpoint, root, dtype=dtype, **SMALL, **options, **KINDS[kind]) as backend:
        assert invariance.by_rows()
        poison(backend)
        yield backend


@pytest.fixture(scope="module", autouse=True)
def invariant() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        patch.delenv("DEEPINFER_VLLM_DSPARK_BUDGET", raising=False)  # a budget goes by the clock: it may
        yield
    invariance._way = invariance.Way.NONE


@pytest.fixture(scope="module")
def wanted_of() -> dict[str, list[Answer]]:
    """By dtype: what runner V2 answered first."""
    return {}


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def case(
    request: pytest.FixtureRequest,
    trained_pair: Path,
    tmp_path_factory: pytest.TempPathFactory,
    wanted_of: dict[str, list[Answer]],
) -> Iterator[Case]:
    kind, dtype = request.param
    with started(trained_pair, tmp_path_factory.mktemp("store") / "root", kind, dtype) as backend:
        first = alone(backend, "first")
        wanted = wanted_of.setdefault(dtype, first)
        if kind == "V1":  # the runners draw in different ways
            assert first[:4] == wanted[:4]
            wanted = first
        assert first == wanted
        yield Case(kind, backend, wanted)


def test_together_in_chunks_of_any_size_anew_and_from_caches(case: Case) -> None:
    """Computed; after hits in the prefix cache; after hits in the store."""
    for chunk in CHUNKS:
        case.scheduled(chunk)
        salt = f"together {chunk}"
        case.check(together(case.backend, salt), "anew", salt)
        case.check(together(case.backend, salt), "prefix", salt)
        assert case.cached_tokens(salt) > 0
        forget(case.backend)
        hits = tier_of(case.backend)._store.stats().hits
        case.check(together(case.backend, salt), "store", salt)
        assert tier_of(case.backend)._store.stats().hits > hits


def test_alone_in_chunks(case: Case) -> None:
    case.scheduled(CHUNKS[-1])
    case.check(alone(case.backend, "in chunks"))


def test_prefixes_that_others_computed(case: Case) -> None:
    """Rows of a prompt's beginning, written in one way of cutting, for a request cut in another."""
    for chunk, other in ((2048, 17), (17, 64)):
        case.scheduled(chunk)
        salt = f"prefix {chunk}"
        ask(case.backend, [(prompt[: len(prompt) * 2 // 3], {"max_tokens": 1}) for prompt, _ in requests()], salt)
        assert case.cached_tokens(salt) > 0
        case.scheduled(other)
        case.check(together(case.backend, salt), salt)


def test_preempted_again_and_again(case: Case) -> None:
    """As often as leaves time for a prompt whose logprobs are wanted: it begins anew each time."""
    scheduler = case.backend.scheduler
    for chunk, steps in zip(CHUNKS, (3, 9, 35), strict=True):
        before = scheduler.schedule, scheduler._preempt_request
        preempted = preemptions(case.backend)
        preempt_all_every(case.backend, steps)
        try:
            case.scheduled(chunk)
            case.check(together(case.backend, f"preempted {chunk}"), chunk)
        finally:
            scheduler.schedule, scheduler._preempt_request = before
        assert preempted


def test_whatever_is_verified_of_drafts(case: Case) -> None:
    """Any number of drafts in any step, and blocks left out."""
    if case.kind != "DSpark":
        pytest.skip("drafts nothing")
    with whims(case.backend, drafting=0.8) as dice:
        for chunk in CHUNKS[1:]:
            case.scheduled(chunk)
            case.check(together(case.backend, f"whims {chunk}"), chunk)
    assert any(0 < sum(drafts) < sum(there) for there, drafts in dice.plans)
