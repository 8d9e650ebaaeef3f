"""VLLM_BATCH_INVARIANT=1: the bits of a request's tokens and logprobs, whatever the engine does with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.invariant import CHUNKS, Answer, Case, alone, ask, greedy, preempting, requests, started, switched_on
from engine.kvstore import forget, tier_of
from engine.sampling_kinds import kinds
from engine.whims import whims

ENGINES = [(kind, dtype) for dtype in ("float32", "bfloat16") for kind in ("V2", "V1", "DSpark")]
LONGEST = 2
PREEMPT_STEPS = {2048: (3, 3, 3), 64: (9, 4, 4), 17: (35, 8, 8)}
"""By chunk, and by where rows come from: as often as leaves time for a prompt whose logprobs are wanted, which begins
anew each time."""


@pytest.fixture(scope="module", autouse=True)
def invariant() -> Iterator[None]:
    with switched_on():
        yield


@pytest.fixture(scope="module")
def wanted_of() -> dict[str, list[Answer]]:
    """By dtype: what runner V2 answered first."""
    return {}


@pytest.fixture(scope="module")
def wanted_of_kinds() -> dict[str, list[Answer]]:
    """Likewise, for one request of each kind of sampling."""
    return {}


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def case(
    request: pytest.FixtureRequest,
    trained_pair: Path,
    tmp_path_factory: pytest.TempPathFactory,
    wanted_of: dict[str, list[Answer]],
) -> Iterator[Case]:
    kind, dtype = request.param
    root = tmp_path_factory.mktemp("store") / "root"
    with started(trained_pair, root, kind, dtype, skip_tokenizer_init=False) as backend:
        asked = requests()
        first = alone(backend, asked, "first")
        wanted = wanted_of.setdefault(dtype, first)
        if kind == "V1":  # the runners draw in different ways
            assert greedy(asked, first) == greedy(asked, wanted)
            wanted = first
        assert first == wanted
        yield Case(kind, backend, asked, wanted)


@pytest.mark.parametrize("preempted", [False, True], ids=["", "preempted"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_cross_product(case: Case, chunk: int, preempted: bool) -> None:
    """Together, in chunks of any size: computed, after hits in the prefix cache, after hits in the store; each without
    preemption, and with all requests preempted again and again."""
    case.scheduled(chunk)
    salt = f"{chunk} {preempted}"
    for source, steps in zip(("anew", "prefix cache", "store"), PREEMPT_STEPS[chunk], strict=True):
        if source == "prefix cache":
            assert case.cached_tokens(LONGEST, salt) > 0
        if source == "store":
            forget(case.backend)
        hits = tier_of(case.backend)._store.stats().hits
        with preempting(case.backend, steps if preempted else 0) as ids:
            case.check_together(salt, source, preempted)
        assert bool(ids) == preempted
        assert source != "store" or tier_of(case.backend)._store.stats().hits > hits


def test_alone_in_chunks(case: Case) -> None:
    case.scheduled(CHUNKS[-1])
    case.check_alone("in chunks")


def test_prefixes_that_others_computed(case: Case) -> None:
    """Rows of a prompt's beginning, written in one way of cutting, for a request cut in another."""
    for chunk, other in ((2048, 17), (17, 64)):
        case.scheduled(chunk)
        salt = f"prefix {chunk}"
        beginnings = [prompt["prompt"][: len(prompt["prompt"]) * 2 // 3] for prompt, _ in case.asked]
        ask(case.backend, [({"prompt": beginning}, {"max_tokens": 1}) for beginning in beginnings], salt)
        assert case.cached_tokens(LONGEST, salt) > 0
        case.scheduled(other)
        case.check_together(salt)


def test_whatever_is_verified_of_drafts(case: Case) -> None:
    """Any number of drafts in any step, and blocks left out."""
    if case.kind != "DSpark":
        pytest.skip("drafts nothing")
    with whims(case.backend, drafting=0.8) as dice:
        for chunk in CHUNKS[1:]:
            case.scheduled(chunk)
            case.check_together(f"whims {chunk}")
    assert any(0 < sum(drafts) < sum(there) for there, drafts in dice.plans)


def test_every_kind_of_sampling(
    case: Case, wanted_of_kinds: dict[str, list[Answer]], request: pytest.FixtureRequest
) -> None:
    """Grammars, stops, several answers, penalties, limits, logprobs of any number: alone, and all in one batch."""
    dtype = request.node.callspec.params["case"][1]
    asked = kinds(drafts=case.kind == "DSpark")
    case.scheduled(CHUNKS[0])
    first = alone(case.backend, asked, "kinds")
    wanted = wanted_of_kinds.setdefault(dtype, first)[: len(asked)]
    if case.kind == "V1":
        assert greedy(asked, first) == greedy(asked, wanted)
        wanted = first
    mixed = Case(case.kind, case.backend, asked, wanted)
    mixed.check(first, "alone")
    mixed.check_together("kinds together", "anew")
    mixed.asked, mixed.wanted = asked[::-1], wanted[::-1]
    case.scheduled(CHUNKS[-1])
    mixed.check_together("kinds in another order", "in chunks")
    with preempting(case.backend, 40):
        mixed.check_together("kinds in another order", "preempted, from the cache")
