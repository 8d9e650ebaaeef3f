"""Real engines with the chunk scheduler: the golden answers, however it cuts, hits, preempts and stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.scheduling import NAME
from engine.harness import Engine, golden_prompts, poison, preempt_all_every, preemptions
from engine.test_dspark import case, every_draft_is_verified, start  # noqa: F401
from engine.test_scheduling import assert_golden
from images import noise

CHUNKS = {"DEEPINFER_VLLM_SCHED_GRID": "16", "DEEPINFER_VLLM_SCHED_CHUNK": "64"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target below any step: every chunk beside a decode is one of the grid, whatever the clock says."""
    below = {"DEEPINFER_VLLM_SCHED_TARGET_MS": "0.001", "DEEPINFER_VLLM_SCHED_PREFILL_SHARE": "0"}
    for name, value in (CHUNKS | below).items():
        monkeypatch.setenv(name, value)


class Ends:
    """Where chunks of each request ended, and by its length, which tells requests apart."""

    def __init__(self, backend: EngineBackend) -> None:
        self.by_length: dict[int, set[int]] = {}
        scheduler, original = backend.scheduler, backend.scheduler._update_after_schedule

        def update(output: Any) -> None:
            for name, count in output.num_scheduled_tokens.items():
                request = scheduler.requests[name]
                end = request.num_computed_tokens + count
                if end <= request.num_prompt_tokens:
                    self.by_length.setdefault(request.num_prompt_tokens, set()).add(end)
            original(output)

        scheduler._update_after_schedule = update


@pytest.mark.parametrize("name", ["v41-tiny-a", "v41-tiny-b"])
def test_golden_answers_from_chunks_hits_and_preemptions(engine: Engine, name: str) -> None:
    prompts = golden_prompts(name)
    ids = [p.input_ids.tolist() for p in prompts]
    with engine(name, max_num_batched_tokens=300, scheduler_cls=NAME) as backend:
        ends = Ends(backend)
        poison(backend)
        assert_golden(backend.generate_many(ids, 24), prompts)
        assert all(end % 16 == 0 or end == length for length, of in ends.by_length.items() for end in of)
        assert len(ends.by_length[max(map(len, ids))]) > 10
        assert_golden(backend.generate_many(ids, 24), prompts)  # from the prefix cache
        preempt_all_every(backend, 7)
        preempted = preemptions(backend)
        assert_golden(backend.generate_many(ids, 24), prompts)
        assert len(preempted) >= 12
        costs = backend.scheduler._costs
        assert costs._fit.observations > 60 and costs.now != costs._fit.prior


def test_checkpoints_of_a_request(engine: Engine) -> None:
    prompt = golden_prompts("v41-tiny-a")[5]
    ids = prompt.input_ids.tolist()
    with engine("v41-tiny-a", scheduler_cls=NAME) as backend:
        ends = Ends(backend)
        answer = backend.generate_many(
            [ids], 24, extra_args={"kv_transfer_params": {"chunk_checkpoints": [5, 100, 333, 10_000]}}
        )
        assert_golden(answer, (prompt,))
        assert {5, 100, 333} <= ends.by_length[len(ids)]


def test_with_drafts_the_answers_are_the_targets(case: Any) -> None:  # noqa: F811
    backend = start(case, scheduler_cls=NAME)
    try:
        assert [f.ids for f in backend.generate_many(case.prompts, 32, logits=False)] == case.answers
        assert backend.scheduler._decode_tokens == 6
    finally:
        backend.close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("pictures")
    create(directory, layers=4, shards=1, dtype="float32", vision=True)
    yield directory


def test_images_are_whole_and_answers_as_with_the_stock_scheduler(pictures: Path) -> None:
    from vllm import SamplingParams

    image = [{"type": "image_pil", "image_pil": noise(90 + 30 * number, 60)} for number in range(3)]
    texts = [{"type": "text", "text": text} for text in ("What is this?", "And that?", "Compare them " * 10)]
    content = [part for pair in zip(texts, image, strict=True) for part in pair]
    messages = [[{"role": "user", "content": content}], [{"role": "user", "content": texts[:1]}]]
    answers = []
    for chosen in ({}, {"scheduler_cls": NAME}):
        backend = EngineBackend(
            pictures, "float32", "plain", skip_tokenizer_init=False, max_num_batched_tokens=2048, **chosen
        )
        try:
            ends = Ends(backend)
            spans: list[tuple[int, int]] = []
            add = backend.scheduler.add_request

            def added(request: Any, add: Any = add, spans: Any = spans) -> None:
                spans += [(f.mm_position.offset, f.mm_position.length) for f in request.mm_features]
                add(request)

            backend.scheduler.add_request = added
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            found = backend._llm.chat(messages, params, use_tqdm=False)
            answers.append([list(each.outputs[0].token_ids) for each in found])
        finally:
            backend.close()
    assert answers[1] == answers[0]
    assert len(spans) == 3
    longest = ends.by_length[max(ends.by_length)]
    assert len(longest) > 2
    assert not any(first < end < first + tokens for end in longest for first, tokens in spans)
