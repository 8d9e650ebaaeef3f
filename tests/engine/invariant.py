"""What the tests of VLLM_BATCH_INVARIANT=1 share: requests, all that is answered to them, and ways to ask them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.native import invariance
from deepinfer_vllm.training.texts import text
from engine.harness import model_of, poison, preempt_all_every, preemptions
from engine.kvstore import engine_on

CHUNKS = (2048, 64, 17)
"""Tokens of a step: every prompt whole, and two ways to cut them."""

KINDS: dict[str, dict[str, Any]] = {
    "V1": {"runner": "V1"},
    "V2": {"runner": "V2"},
    "DSpark": {"runner": "V2", "speculative_config": {"method": "dspark", "num_speculative_tokens": 5}},
}
SMALL = {"block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 8, "max_model_len": 448}
COUNT = 10

Asked = tuple[Mapping[str, Any], dict[str, Any]]
"""A prompt in vLLM's form, and sampling parameters where they are not greedy ones."""
Answer = tuple[Any, ...]
"""All that is answered: of each output tokens, text, logprobs and why it ended; logprobs of the prompt."""


@dataclass
class Case:
    """An engine, and what each request is answered alone, in one chunk, by the engine that does least."""

    kind: str
    backend: EngineBackend
    asked: list[Asked]
    wanted: list[Answer]

    def scheduled(self, tokens: int) -> None:
        """At most so many tokens a step from now on."""
        self.backend.scheduler.max_num_scheduled_tokens = tokens

    def check(self, found: list[Answer], *where: Any) -> None:
        for number, (answer, wanted) in enumerate(zip(found, self.wanted, strict=True)):
            assert answer == wanted, (self.kind, where, number)

    def check_together(self, salt: str, *where: Any) -> None:
        """Ask all at once."""
        self.check(ask(self.backend, self.asked, salt), salt, *where)

    def check_alone(self, salt: str, *where: Any) -> None:
        """Ask one after the other."""
        self.check(alone(self.backend, self.asked, salt), salt, *where)

    def cached_tokens(self, number: int, salt: str) -> int:
        """Of one of the prompts."""
        return self.backend.cached_tokens({**self.asked[number][0], "cache_salt": salt})


def ask(backend: EngineBackend, asked: list[Asked], salt: str) -> list[Answer]:
    """Together. What is cached and stored is found again under the same salt only."""
    prompts = [{**prompt, "cache_salt": salt} for prompt, _ in asked]
    found = backend._llm.generate(prompts, [_parameters(given) for _, given in asked], use_tqdm=False)
    return [_answer(request) for request in found]


def alone(backend: EngineBackend, asked: list[Asked], salt: str) -> list[Answer]:
    """One after the other."""
    return [answer for request in asked for answer in ask(backend, [request], salt)]


def _parameters(given: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, **given}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    return SamplingParams(**fields)


def _answer(request: Any) -> Answer:
    outputs = [
        (list(o.token_ids), o.text, _values(o.logprobs), o.finish_reason, o.stop_reason) for o in request.outputs
    ]
    return outputs, _values(request.prompt_logprobs)


def _values(rows: Any) -> list[dict[int, float]]:
    return [{token: of.logprob for token, of in row.items()} for row in rows or [] if row]


@functools.cache
def texts() -> list[str]:
    return [text(name, 900)[:length] for name, length in (("code", 5), ("records", 90), ("prose", 170), ("lists", 330))]


def requests() -> list[Asked]:
    short, records, prose, lists = ({"prompt": prompt} for prompt in texts())
    return [
        (short, {"logprobs": 3}),
        (records, {"logprobs": 1}),
        (lists, {"logprobs": 2}),
        (prose, {"logprobs": 1, "prompt_logprobs": 1, "repetition_penalty": 1.2}),
        (records, {"logprobs": 1, "temperature": 0.7, "seed": 5}),
        (lists, {"logprobs": 1, "temperature": 1.0, "seed": 6, "top_p": 0.9, "top_k": 50}),
    ]


def greedy(asked: list[Asked], answers: list[Answer]) -> list[Answer]:
    """The answers to requests that draw nothing."""
    return [answer for (_, given), answer in zip(asked, answers, strict=True) if "seed" not in given]


@contextmanager
def switched_on() -> Iterator[None]:
    """The mode, for engines of this process, and drafts verified by a budget that goes by the clock: it may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        patch.delenv("DEEPINFER_VLLM_DSPARK_BUDGET", raising=False)
        try:
            yield
        finally:
            invariance._way = invariance.Way.NONE


@contextmanager
def started(checkpoint: Path, root: Path, kind: str, dtype: str, **options: Any) -> Iterator[EngineBackend]:
    """An engine over a store. Decoder-side replay is asked for, as it is by default, and is off in this mode."""
    given = {"logprobs_mode": "raw_logprobs", "replay": True, **SMALL, **KINDS[kind], **options}
    with engine_on(checkpoint, root, dtype=dtype, **given) as backend:
        assert invariance.by_rows() and not model_of(backend).replay
        poison(backend)
        yield backend


@contextmanager
def preempting(backend: EngineBackend, steps: int) -> Iterator[list[str]]:
    """While this lasts every running request is preempted each `steps` steps, if they are not 0; their ids."""
    scheduler = backend.scheduler
    before = scheduler.schedule, scheduler._preempt_request
    ids = preemptions(backend)
    if steps:
        preempt_all_every(backend, steps)
    try:
        yield ids
    finally:
        scheduler.schedule, scheduler._preempt_request = before
