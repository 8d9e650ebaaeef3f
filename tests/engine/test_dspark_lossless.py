"""DSpark on the trained pair beside every feature of a request: the answers of an engine that does not draft."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.training.texts import WORKLOADS, text
from engine.harness import preempt_all_every, preemptions
from engine.kvstore import engine_on, forget, tier_of
from engine.test_dspark import DRAFTS
from engine.whims import runner_of, whims

SPECULATIVE = {"method": "dspark", "num_speculative_tokens": DRAFTS}
SMALL = {
    "block_size": 16,
    "max_num_batched_tokens": 96,  # long prompts come in chunks, beside requests that decode
    "max_num_seqs": 8,
    "max_model_len": 448,
    "skip_tokenizer_init": False,
    "logprobs_mode": "raw_logprobs",
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    text: str
    ended: tuple[str | None, int | str | None]
    logprobs: list[dict[int, float]]


Asked = tuple[str, dict[str, Any]]


@functools.cache
def prompt(workload: str, characters: int) -> str:
    return text(workload, 900)[:characters]


def requests(tokenizer: Any) -> list[Asked]:
    """Prompts and sampling parameters. What is drawn at random is drawn from one token."""
    from vllm.sampling_params import StructuredOutputsParams as Outputs

    code, records, sums, prose = (prompt(name, 150) for name in ("code", "records", "sums", "prose"))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["yes", "no"]}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    digits = sorted({*tokenizer.encode("0123456789+=\n ", add_special_tokens=False)})
    often = tokenizer.encode(" ,\n;", add_special_tokens=False)
    return [
        *((prompt(name, 100), {}) for name in WORKLOADS),
        (code, {"logprobs": 3}),
        (records, {"logprobs": 1, "prompt_logprobs": 1, "repetition_penalty": 1.3}),
        (prose, {"structured_outputs": Outputs(json=schema)}),
        (sums, {"structured_outputs": Outputs(regex="(yes|no){3} [0-9]{6}-[a-f]{8}")}),
        (records, {"structured_outputs": Outputs(choice=["perhaps so", "perhaps not", "no"]), "logprobs": 1}),
        (code, {"stop": ["\n"], "min_tokens": 12}),
        (records, {"stop": ["e", "on"], "include_stop_str_in_output": True}),
        (prose, {"stop": ["th"]}),
        (sums, {"stop_token_ids": often}),
        (sums, {"stop_token_ids": often, "min_tokens": 17}),
        (prose, {"min_tokens": 30}),
        (records, {"n": 3, "temperature": 1.0, "top_k": 1, "seed": 7}),
        (code, {"n": 2, "temperature": 0.7, "top_p": 1e-9, "seed": 3}),
        (prose, {"presence_penalty": 0.6, "frequency_penalty": 0.4}),
        (code, {"bad_words": ["e", "return", "def"]}),
        (sums, {"allowed_token_ids": digits}),
        (prose[:1], {"ignore_eos": True}),
        (code, {"max_tokens": 1}),
        (records, {"max_tokens": 2, "logprobs": 1}),
        (prompt("records", 500), {"max_tokens": 200, "ignore_eos": True}),  # ends at the model's last position
    ]


def answers(backend: EngineBackend) -> list[list[Answer]]:
    """To all requests, together."""
    from vllm import SamplingParams

    asked = requests(backend._llm.get_tokenizer())
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 32, **sampling}) for _, sampling in asked]
    found = backend._llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    return [[answer(output, request.prompt_logprobs) for output in request.outputs] for request in found]


def answer(output: Any, prompt_logprobs: Any) -> Answer:
    rows = [row for row in prompt_logprobs or [] if row] + (output.logprobs or [])
    logprobs = [{token: of.logprob for token, of in row.items()} for row in rows]
    return Answer(list(output.token_ids), output.text, (output.finish_reason, output.stop_reason), logprobs)


def assert_same(found: list[list[Answer]], wanted: list[list[Answer]]) -> None:
    """The same tokens, texts and ends, and logprobs as close as products of other sizes make them."""
    for number, (those, these) in enumerate(zip(found, wanted, strict=True)):
        for one, other in zip(those, these, strict=True):
            assert (one.tokens, one.text, one.ended) == (other.tokens, other.text, other.ended), number
            assert one.logprobs == [pytest.approx(row, abs=2e-3) for row in other.logprobs], number


def counts(backend: EngineBackend) -> tuple[int, int, int]:
    """Tokens drafted, verified and accepted so far."""
    kinds = ("drafted", "verified", "accepted")
    found = backend._llm.get_metrics()
    return tuple(  # type: ignore[return-value]
        int(sum(m.value for m in found if m.name == f"vllm:deepinfer_dspark_{kind}_tokens")) for kind in kinds
    )


@pytest.fixture(scope="module")
def checkpoint(trained_pair: Path) -> Path:
    return trained_pair


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of engines with and without drafts."""
    return tmp_path_factory.mktemp("store") / "root"


@pytest.fixture(scope="module", autouse=True)
def the_budget_is_on() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DEEPINFER_VLLM_DSPARK_BUDGET", raising=False)
        yield


@pytest.fixture(scope="module")
def wanted(checkpoint: Path, root: Path) -> list[list[Answer]]:
    """Without drafts; the engine leaves its prompts' rows in the store."""
    with engine_on(checkpoint, root, runner="V2", **SMALL) as backend:
        found = answers(backend)
        forget(backend)
        assert 10 < len(found[-1][0].tokens) < 200
        return found


@pytest.fixture(scope="module")
def backend(checkpoint: Path, root: Path, wanted: list[list[Answer]]) -> Iterator[EngineBackend]:
    with engine_on(checkpoint, root, speculative_config=SPECULATIVE, **SMALL) as backend:
        yield backend


def test_beside_every_feature(backend: EngineBackend, wanted: list[list[Answer]]) -> None:
    """Beside what an engine without drafts has stored; from the prefix cache; from what this one has stored.

    How much is drafted and verified is for the budget to say, which goes by the clock.
    """
    assert_same(answers(backend), wanted)
    assert_same(answers(backend), wanted)
    assert backend.cached_tokens({"prompt": prompt("records", 500)}) > 0
    forget(backend)
    hits = tier_of(backend)._store.stats().hits
    assert_same(answers(backend), wanted)
    assert tier_of(backend)._store.stats().hits > hits
    drafted, verified, accepted = counts(backend)
    assert drafted >= verified >= accepted


def test_whatever_is_decided(backend: EngineBackend, wanted: list[list[Answer]]) -> None:
    """Any number of drafts verified, blocks left out at any time, over rows from the store, and preempted."""
    schedule = backend.scheduler.schedule
    try:
        with whims(backend, drafting=0.5) as dice:
            forget(backend)
            assert_same(answers(backend), wanted)
            preempted = preemptions(backend)
            preempt_all_every(backend, 7)
            assert_same(answers(backend), wanted)
        assert preempted and any(0 < sum(drafts) < sum(there) for there, drafts in dice.plans)
    finally:
        backend.scheduler.schedule = schedule


def test_drafts_stand_as_before_once_drafting_goes_on(backend: EngineBackend) -> None:
    """An engine that drafts in bursts has written all that its draft model reads in the steps between them."""
    from vllm import SamplingParams

    asked = [prompt(name, 200) for name in ("records", "lists")]
    greedy = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    rates = []
    for burst in (1, 12):
        steps = iter(range(1 << 30))
        with whims(backend) as dice:
            dice.drafts = lambda there: there  # type: ignore[method-assign]
            dice.wants_drafts = lambda *_, burst=burst, steps=steps: (  # type: ignore[method-assign]
                burst == 1 or next(steps) // burst % 2 == 1
            )
            _, verified, accepted = counts(backend)
            backend._llm.generate(asked, greedy, use_tqdm=False)
            _, verified_now, accepted_now = counts(backend)
        rates.append((accepted_now - accepted) / (verified_now - verified))
    assert rates[1] > 0.8 * rates[0] > 0.2


def test_engines_with_and_without_drafts_keep_apart_in_one_store(
    checkpoint: Path, root: Path, backend: EngineBackend, wanted: list[list[Answer]]
) -> None:
    """An engine without drafts finds what another such left, though one with them has been there since."""
    forget(backend)
    backend.close()
    with engine_on(checkpoint, root, runner="V2", **SMALL) as plain:
        assert_same(answers(plain), wanted)
        assert tier_of(plain)._store.stats().hits > 0
        assert runner_of(plain).speculator is None
    assert len([found for found in root.iterdir() if found.is_dir()]) == 2
