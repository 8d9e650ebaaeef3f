"""vLLM's DSpark speculator over our target and draft model: the target's own answers, in fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from engine.foresight import foresee
from engine.harness import model_of, poison, preempt_all_every
from engine.test_topologies import SIZES, sharing
from images import noise
from reference import Reference, load

COUNT, DRAFTS = 32, 5
DRAFT = {
    "num_nextn_predict_layers": 2,
    "dspark_markov_rank": 64,
    "extra": {"dspark_target_layer_ids": [1, 3, 4]},
}
TOPOLOGY = {**sharing((0, 2, 2, 1, 1), (1, 3), (1, 3, 4)), "engram_layer_ids": (1,)}


@dataclass
class Case:
    directory: Path
    prompts: list[list[int]]
    reference: Reference
    answers: list[list[int]]
    """What the reference says after each prompt, greedily."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("dspark"))


def make_case(directory: Path) -> Case:
    """A checkpoint with draft layers whose drafts are often right."""
    write_checkpoint(directory, TextConfig(**{**SIZES, **TOPOLOGY, **DRAFT}).published("float32"), seed=3, shards=1)
    reference = load(directory)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(380, (length,), generator=generator).tolist() for length in (1, 9, 40, 100)]
    answers = [reference.greedy(prompt, COUNT) for prompt in prompts]
    foresee(directory, [p[-1:] + a for p, a in zip(prompts, answers, strict=True)], forget=6)
    return Case(directory, prompts, reference, answers)


def start(case: Case, **engine_args: Any) -> EngineBackend:
    more = engine_args.pop("speculative", {})  # None: no drafts at all
    speculative = None if more is None else {"method": "dspark", "num_speculative_tokens": DRAFTS, **more}
    defaults = {"block_size": 16, "max_num_batched_tokens": 50, "disable_log_stats": False}
    return EngineBackend(
        case.directory, "float32", "plain", speculative_config=speculative, **{**defaults, **engine_args}
    )


@pytest.fixture(scope="module", autouse=True)
def every_draft_is_verified() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        patch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", "fixed")  # how many are verified is test_dspark_budget's
        yield


@pytest.fixture(scope="module")
def backend(case: Case) -> Iterator[EngineBackend]:
    backend = start(case, max_model_len=len(case.prompts[-1]) + COUNT)  # the longest answer ends there
    yield backend
    backend.close()


def poison_draft(backend: EngineBackend) -> None:
    """As `poison`, for the draft model's caches."""
    core = backend._llm.llm_engine.engine_core.engine_core
    draft = core.model_executor.driver_worker.worker.model_runner.speculator.model
    assert draft.lm_head is model_of(backend).head and draft.model.embed_tokens is model_of(backend).embed
    for layer in draft.model.mtp:
        layer.attn.window_rows.kv_cache.fill_(torch.nan)


def accepted(backend: EngineBackend) -> tuple[int, int]:
    """Tokens drafted and accepted so far."""
    counts = {m.name: getattr(m, "value", 0) for m in backend._llm.get_metrics()}
    return tuple(int(counts[f"vllm:spec_decode_num_{kind}_tokens"]) for kind in ("draft", "accepted"))  # type: ignore[return-value]


def test_greedy_answers_are_the_targets(case: Case, backend: EngineBackend) -> None:
    """Together, in chunks, from the prefix cache, over caches full of NaN; drafts stand and fall in between."""
    poison(backend)
    poison_draft(backend)
    for _ in range(2):
        before = accepted(backend)
        found = backend.generate_many(case.prompts, COUNT)
        assert [f.ids for f in found] == case.answers
        drafted, stood = (after - b for after, b in zip(accepted(backend), before, strict=True))
        assert 0.3 * drafted < stood < 0.9 * drafted
        for prompt, answer in zip(case.prompts, found, strict=True):
            want = case.reference.forward(prompt + answer.ids[:-1]).logits[len(prompt) - 1 :]
            assert answer.logits is not None
            assert (answer.logits - want).abs().max() <= 2e-4
    assert backend.cached_tokens(case.prompts[-1]) > 0


def test_one_request_at_a_time(case: Case, backend: EngineBackend) -> None:
    for prompt, answer in zip(case.prompts, case.answers, strict=True):
        assert backend.generate(prompt, COUNT).ids == answer


def test_preempted_and_resumed(case: Case, backend: EngineBackend) -> None:
    preempt_all_every(backend, 4)
    assert [f.ids for f in backend.generate_many(case.prompts, COUNT, logits=False)] == case.answers


def test_prompt_logprobs_keep_their_rows(case: Case, backend: EngineBackend) -> None:
    prompt = case.prompts[2]
    found = backend.prefill(prompt)
    assert (found.logits - case.reference.forward(prompt).logits).abs().max() <= 2e-4


def test_with_replay(case: Case) -> None:
    """Prompts longer than the window are cut short above the last KV source; drafts change nothing of that."""
    window = case.reference.config.sliding_window
    backend = start(case, replay=True, max_num_batched_tokens=1024)
    try:
        poison(backend)
        poison_draft(backend)
        for prompt, again in [(p, again) for again in (False, True) for p in case.prompts]:
            answer = backend.generate(prompt, COUNT)
            truncated = prompt + answer.ids[:-1]
            want = case.reference.forward(truncated, replay_from=max(0, len(prompt) - window)).logits[len(prompt) - 1 :]
            assert answer.ids == want.argmax(-1).tolist(), again
    finally:
        backend.close()


def test_over_tensor_parallel_ranks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    backend = start(case, tensor_parallel_size=2)
    try:
        assert [f.ids for f in backend.generate_many(case.prompts, COUNT, logits=False)] == case.answers
        assert accepted(backend)[1] > 0
    finally:
        backend.close()


GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(yes|no){3} [0-9]{6}-[a-f]{8}"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"choice": ["perhaps so", "perhaps not"]},
]


def answers_to_grammars_and_images(backend: EngineBackend) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of requests with structured outputs, with penalties, and with an image."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fixed = {"temperature": 0, "max_tokens": 24}
    params = [SamplingParams(**fixed, structured_outputs=StructuredOutputsParams(**grammar)) for grammar in GRAMMARS]
    params.append(SamplingParams(**fixed, repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True))
    found = backend._llm.generate(["Tell me"] * len(params), params, use_tqdm=False)
    image = {"type": "image_pil", "image_pil": noise(90, 60)}
    message = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}
    found += backend._llm.chat([message], SamplingParams(**fixed, ignore_eos=True), use_tqdm=False)
    return [(list(f.prompt_token_ids), list(f.outputs[0].token_ids)) for f in found]


def test_grammars_penalties_and_images_as_without_drafts(tmp_path: Path) -> None:
    """The drafts foresee the answers, so that some stand also under a grammar, which they do not know."""
    create(tmp_path, layers=4, shards=1, dtype="float32", vision=True)
    case = Case(tmp_path, [], load(tmp_path), [])
    found = []
    for speculative in (None, {}):
        backend = start(case, speculative=speculative, max_num_batched_tokens=2048, skip_tokenizer_init=False)
        try:
            found.append(answers_to_grammars_and_images(backend))
            if speculative is not None:
                assert accepted(backend)[1] > 10
        finally:
            backend.close()
        foresee(tmp_path, [prompt[-1:] + answer for prompt, answer in found[0]], forget=6)
    assert found[1] == found[0]


HEAT = 2.0


def outcomes(case: Case, prompt: list[int], tokens: list[int], depth: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of that many tokens when only these may be drawn, at temperature HEAT."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        longer = {}
        for drawn, chance in chances.items():
            logits = case.reference.forward([*prompt, *drawn]).logits[-1, tokens]
            longer |= {(*drawn, t): chance * float(p) for t, p in zip(tokens, (logits / HEAT).softmax(-1), strict=True)}
        chances = longer
    return chances


@pytest.mark.parametrize(
    ("draws", "judge"),
    [("greedy", "standard"), ("greedy", "block"), ("probabilistic", "standard"), ("probabilistic", "block")],
)
def test_random_answers_have_the_targets_distribution(case: Case, draws: str, judge: str) -> None:
    """Seeded, so the same draws every time. The successors that are foreseen are among the tokens, so some stand."""
    from vllm import SamplingParams

    prompt, count = case.prompts[3], 500
    tokens = sorted({*case.answers[3][:5]})
    expected = outcomes(case, prompt, tokens, depth=3)
    params = [
        SamplingParams(
            temperature=HEAT, seed=seed, max_tokens=5, ignore_eos=True, detokenize=False, allowed_token_ids=tokens
        )
        for seed in range(count)
    ]
    speculative = {"draft_sample_method": draws, "rejection_sample_method": judge}
    backend = start(case, speculative=speculative, max_num_seqs=64, max_num_batched_tokens=1024)
    try:
        found = backend._llm.generate([{"prompt_token_ids": prompt}] * count, params, use_tqdm=False)
        assert accepted(backend)[1] > count / 20
    finally:
        backend.close()
    drawn = Counter(tuple(o.outputs[0].token_ids[:3]) for o in found)
    assert drawn.keys() <= expected.keys()
    for outcome, chance in expected.items():
        spread = (count * chance * (1 - chance)) ** 0.5
        assert abs(drawn[outcome] - count * chance) <= 4 * spread + 1, (outcome, drawn[outcome], count * chance)
