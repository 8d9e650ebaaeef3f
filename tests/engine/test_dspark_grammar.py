"""Drafts under a grammar: the answers stay the target's, and drafts stand that fell before."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import regex

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.spec_decode.grammar_drafts import GrammarDrafts
from deepinfer_vllm.training.shipped import write_trained
from engine.harness import preempt_all_every
from engine.test_dspark import DRAFTS, HEAT, Case, accepted, outcomes
from reference import load

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</call>",
    },
}
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(yes|no){3} [0-9]{6}-[a-f]{8}"},
    {"json": SCHEMA},
    {"json_object": True},
    {"grammar": 'root ::= item ("," item){3}\nitem ::= [a-z]{3} "=" [0-9]+'},
    {"choice": ["perhaps so", "perhaps not", "never"]},
    {"structural_tag": json.dumps(TAG)},
]
COUNT = 28
PROMPT = "Tell me</think>"
REASONS = {
    "structured_outputs_config": {"reasoning_parser": "deepseek_r1"},
    "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
}
THINK = {"prompt": "Tell me<think>", "thinking_token_budget": 3}


def params(grammar: dict[str, Any], **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fixed = {"temperature": 0, "max_tokens": COUNT, **more}
    return SamplingParams(**fixed, structured_outputs=StructuredOutputsParams(**grammar))


@contextmanager
def engine(directory: Path, *, drafts: bool = True, masks: bool = True, **args: Any) -> Iterator[EngineBackend]:
    speculative = {"method": "dspark", "num_speculative_tokens": DRAFTS, **args.pop("speculative", {})}
    defaults = {
        "block_size": 16,
        "max_num_batched_tokens": 512,
        "disable_log_stats": False,
        "skip_tokenizer_init": False,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        patch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", "fixed")  # a budget goes by the clock
        patch.setenv("DEEPINFER_VLLM_DSPARK_GRAMMAR", str(int(masks)))
        backend = EngineBackend(
            directory, "float32", "plain", speculative_config=speculative if drafts else None, **{**defaults, **args}
        )
        try:
            yield backend
        finally:
            backend.close()


def answers(backend: EngineBackend, prompt: str = PROMPT, **more: Any) -> list[list[int]]:
    """To each grammar and to none."""
    from vllm import SamplingParams

    asked = [params(grammar, **more) for grammar in GRAMMARS]
    asked.append(SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True))
    return [list(f.outputs[0].token_ids) for f in backend._llm.generate([prompt] * len(asked), asked, use_tqdm=False)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained pair, whose drafts are often right and know nothing of grammars."""
    return write_trained(tmp_path_factory.mktemp("grammar") / "pair", dtype="float32").directory


@dataclass
class Expected:
    """What the target says without drafts."""

    answers: list[list[int]]
    thoughtful: list[list[int]]
    """After some reasoning."""


@pytest.fixture(scope="module")
def expected(directory: Path) -> Expected:
    with engine(directory, drafts=False, **REASONS) as backend:
        return Expected(answers(backend), answers(backend, **THINK))


@pytest.fixture(scope="module")
def stood_unmasked(directory: Path, expected: Expected) -> int:
    """Drafts that stood over two rounds of answers without masks."""
    with engine(directory, masks=False) as backend:
        for _ in range(2):
            assert answers(backend) == expected.answers
        return accepted(backend)[1]


@pytest.fixture(scope="module")
def backend(directory: Path, stood_unmasked: int) -> Iterator[EngineBackend]:
    with engine(directory, **REASONS) as backend:
        yield backend


def drafts_of(backend: EngineBackend) -> GrammarDrafts:
    core = backend._llm.llm_engine.engine_core.engine_core
    grammar = core.model_executor.driver_worker.worker.model_runner.speculator.grammar
    assert isinstance(grammar, GrammarDrafts)
    return grammar


def test_answers_are_the_targets_and_more_drafts_stand(
    backend: EngineBackend, expected: Expected, stood_unmasked: int
) -> None:
    """Grammars that end in the middle of a block, together and from the prefix cache."""
    for _ in range(2):
        assert answers(backend) == expected.answers
    drafts = drafts_of(backend)
    assert drafts.masked_drafts > 0 and drafts.requests.unmasked == 0
    assert accepted(backend)[1] > 1.2 * stood_unmasked > 0


def test_several_answers_to_a_prompt(backend: EngineBackend) -> None:
    pattern = GRAMMARS[0]["regex"]
    found = backend._llm.generate([PROMPT], params(GRAMMARS[0], n=3, temperature=1, seed=1), use_tqdm=False)[0]
    assert len({output.text for output in found.outputs}) == 3
    assert all(regex.fullmatch(pattern, output.text) for output in found.outputs)
    assert drafts_of(backend).requests.unmasked == 0


def test_a_schema_that_is_none_is_refused_and_harms_nobody(backend: EngineBackend, expected: Expected) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="Invalid JSON grammar"):
        backend._llm.generate([PROMPT], params({"json": "{no schema"}), use_tqdm=False)
    assert answers(backend) == expected.answers
    backend._llm.generate([PROMPT], use_tqdm=False)  # steps that tell the worker who is finished
    assert not drafts_of(backend).requests


def test_after_reasoning(backend: EngineBackend, expected: Expected) -> None:
    """The masks begin after the token that ends the reasoning, which the engine alone knows."""
    drafts = drafts_of(backend)
    masked, unready = drafts.masked_drafts, drafts.requests.unready_blocks
    assert answers(backend, **THINK) == expected.thoughtful
    assert drafts.masked_drafts > masked and drafts.requests.unready_blocks > unready
    assert drafts.requests.unmasked == 0


def test_preempted_and_resumed(backend: EngineBackend, expected: Expected) -> None:
    preempt_all_every(backend, 3)
    assert answers(backend) == expected.answers
    assert drafts_of(backend).requests.unmasked == 0


def test_random_answers_have_the_targets_distribution(directory: Path, expected: Expected) -> None:
    """Seeded, so the same draws every time; every outcome within four deviations of its count."""
    count = 300
    speculative = {"draft_sample_method": "probabilistic"}
    with engine(directory, speculative=speculative, max_num_seqs=64) as backend:
        tokenizer = backend._llm.get_tokenizer()
        prompt, tokens = tokenizer.encode(PROMPT), tokenizer.encode("xyz", add_special_tokens=False)
        chances = outcomes(Case(directory, [], load(directory), []), prompt, tokens, depth=3)
        asked = [params({"regex": "[xyz]{3}"}, temperature=HEAT, seed=seed) for seed in range(count)]
        found = backend._llm.generate([PROMPT] * count, asked, use_tqdm=False)
        assert drafts_of(backend).requests.unmasked == 0
        assert accepted(backend)[1] > count / 2
    drawn = Counter(tuple(f.outputs[0].token_ids[:-1]) for f in found)
    assert drawn.keys() <= chances.keys() and len(chances) == 27
    for outcome, chance in chances.items():
        spread = (count * chance * (1 - chance)) ** 0.5
        assert abs(drawn[outcome] - count * chance) <= 4 * spread + 1, (outcome, drawn[outcome], count * chance)


def test_over_tensor_parallel_ranks(directory: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiles later than the other, and neither masks before both have; else their drafts would differ."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    late = {"worker_extension_cls": "engine.slow_grammars.SlowGrammars"}
    with engine(directory, tensor_parallel_size=2, **late) as backend:
        for _ in range(2):
            assert answers(backend) == expected.answers
        assert accepted(backend)[1] > 20
        first, second = backend._llm.collective_rpc("grammar_counts")
    masked, unready, unmasked = first
    assert first == second
    assert masked > 0 and unready > 0 and unmasked == 0
