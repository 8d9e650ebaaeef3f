"""Model runner V2 on CPU answers as V1 does, on a llama and on V4.1, without Triton."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from engine.harness import Engine, golden_prompts, poison, preempt_all_every, preemptions, sample
from engine.llama import write_llama
from engine.test_scheduling import assert_golden

PROMPTS = [[7 * i % 500 + 3 for i in range(start, start + length)] for start, length in ((0, 9), (40, 70), (5, 33))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@contextmanager
def llama_engine(directory: Path, runner: str, **engine_args: Any) -> Iterator[Any]:
    """vLLM's `LLM` on the llama."""
    args = {"skip_tokenizer_init": False, "max_logprobs": 20, "logprobs_mode": "raw_logprobs", **engine_args}
    backend = EngineBackend(directory, "float32", "plain", runner=runner, **args)
    try:
        runner_module = type(
            backend._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        )
        assert ("worker.cpu.model_runner" in runner_module.__module__) == (runner == "V2")
        yield backend._llm
    finally:
        backend.close()


def requests() -> list[tuple[str, Any]]:
    """What a request may ask of the sampler, greedy, so that both runners must choose alike."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "logprobs": {"logprobs": 5},
        "prompt logprobs": {"prompt_logprobs": 3},
        "logprobs of named tokens": {"logprob_token_ids": [1, 2, 3]},
        "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.9, "logprobs": 1},
        "bias and least length": {"logit_bias": {5: 4.0, 9: -2.0}, "min_tokens": 6, "stop_token_ids": [5]},
        "allowed tokens": {"allowed_token_ids": [5, 6, 7, 40]},
        "bad words": {"bad_words": ["the", "a b"]},
        "greedy min-p": {"min_p": 0.3, "top_k": 4, "top_p": 0.5},
        "regex": {"structured_outputs": StructuredOutputsParams(regex="[ab]{3}c+")},
        "json": {"structured_outputs": StructuredOutputsParams(json=schema), "max_tokens": 30},
    }
    return [(name, SamplingParams(**{"temperature": 0, "max_tokens": 12, **params})) for name, params in asked.items()]


def answers(llm: Any) -> dict[str, list[Any]]:
    """By request: token ids, then logprobs and ranks to 5 digits."""
    found = {}
    for name, params in requests():
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        found[name] = [
            (list(o.outputs[0].token_ids), rounded(o.outputs[0].logprobs), rounded(o.prompt_logprobs)) for o in outputs
        ]
    return found


def rounded(rows: Any) -> list[dict[int, tuple[float, int | None]]]:
    return [{token: (round(lp.logprob, 4), lp.rank) for token, lp in (row or {}).items()} for row in rows or []]


@pytest.mark.parametrize("chunk", [2048, 16])
def test_a_llama_answers_alike(llama: Path, chunk: int) -> None:
    with llama_engine(llama, "V1", max_num_batched_tokens=chunk) as llm:
        first = answers(llm)
    with llama_engine(llama, "V2", max_num_batched_tokens=chunk) as llm:
        second, again = answers(llm), answers(llm)  # the second time from the prefix cache
    assert second == first
    assert {name: [a[0] for a in rows] for name, rows in again.items()} == {
        name: [a[0] for a in rows] for name, rows in first.items()
    }


def test_seeded_answers_repeat(llama: Path) -> None:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=i, max_tokens=30) for i in range(3)]
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    with llama_engine(llama, "V2") as llm:
        batched = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        alone = [
            llm.generate([p], s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)
        ]
    with llama_engine(llama, "V2", max_num_batched_tokens=16) as llm:
        chunked = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert batched == alone == chunked
    assert len({tuple(ids) for ids in batched}) == 3


@pytest.mark.parametrize("chunk", [2048, 17])
def test_golden_answers_in_chunks_and_from_the_cache(engine: Engine, chunk: int) -> None:
    prompts = golden_prompts("v41-tiny-a")
    ids = [p.input_ids.tolist() for p in prompts]
    with engine("v41-tiny-a", runner="V2", max_num_batched_tokens=chunk) as backend:
        poison(backend)
        assert_golden(backend.generate_many(ids, 24), prompts)
        assert_golden(backend.generate_many(ids, 24), prompts)
        assert backend.cached_tokens(ids[5]) == (len(ids[5]) - 1) // 32 * 32


def test_golden_answers_after_preemption(engine: Engine) -> None:
    prompts = golden_prompts("v41-tiny-b")
    ids = [p.input_ids.tolist() for p in prompts]
    with engine("v41-tiny-b", runner="V2", max_num_batched_tokens=300) as backend:
        preempt_all_every(backend, 7)
        preempted = preemptions(backend)
        assert_golden(backend.generate_many(ids, 24), prompts)
        assert len(preempted) >= 12


def test_seeded_answers_of_v41_repeat_however_cut(engine: Engine) -> None:
    prompts = [p.input_ids.tolist() for p in golden_prompts("v41-tiny-a")[:5]]
    with engine("v41-tiny-a", runner="V2") as backend:
        whole = sample(backend, prompts, 20)
        assert sample(backend, prompts, 20) == whole
    with engine("v41-tiny-a", runner="V2", max_num_batched_tokens=24) as backend:
        preempt_all_every(backend, 9)
        assert sample(backend, prompts, 20) == whole
