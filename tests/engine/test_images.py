"""Prompts with images through the engine: however they are cut, batched, cached and preempted, as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.checkpoint.interface import Generation
from deepinfer_vllm.checkpoint.vision import VisionConfig
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from engine.foresight import foresee
from engine.harness import Engine, model_of, poison, preempt_all_every, preemptions
from images import noise
from reference import Reference, load
from reference.vision import Vision

WINDOW, BLOCK, COUNT, IMAGE = 16, 16, 8, 379
MAX_ABS = 2e-4
SMALL = {"block_size": BLOCK, "max_model_len": 1024}


@dataclass(frozen=True)
class Question:
    """A prompt in which IMAGE stands for one image each."""

    ids: tuple[int, ...]
    images: tuple[Image.Image, ...] = ()

    def for_vllm(self) -> Mapping[str, Any]:
        images = {"multi_modal_data": {"image": list(self.images)}} if self.images else {}
        return {"prompt_token_ids": list(self.ids), **images}


@dataclass(frozen=True)
class Oracle:
    """The reference of one checkpoint."""

    directory: Path
    text: Reference
    vision: Vision

    def expanded(self, question: Question) -> list[int]:
        """The prompt as the model sees it."""
        places = iter(self.vision.grid(*image.size).places for image in question.images)
        return [token for t in question.ids for token in ([t] * next(places) if t == IMAGE else [t])]

    def check(self, answers: Sequence[Generation], questions: Sequence[Question], *, replay: bool = False) -> None:
        for answer, question in zip(answers, questions, strict=True):
            prompt, spans = self.expanded(question), [self.vision.span(image) for image in question.images]
            kept_from = max(0, len(prompt) - WINDOW) if replay else 0
            output = self.text.forward(prompt + answer.ids[:-1], images=spans, replay_from=kept_from)
            want = output.logits[len(prompt) - 1 :]
            assert answer.logits is not None
            assert float((answer.logits - want).abs().max()) <= MAX_ABS
            assert answer.ids == want.argmax(-1).tolist()


def write_oracle(directory: Path, **fields: Any) -> Oracle:
    config = TextConfig(vocab_size=384, sliding_window=WINDOW, index_topk=16, candidate_topk_blocks=4, **fields)
    published = config.published("float32", VisionConfig())
    assert published["image_token_id"] == IMAGE
    write_checkpoint(directory, published, seed=3, shards=1)
    return Oracle(directory, load(directory), Vision(directory))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return write_oracle(tmp_path_factory.mktemp("seeing") / "tiny")


def text(seed: int, count: int) -> tuple[int, ...]:
    drawn = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, IMAGE, (count,), generator=drawn).tolist())


def mixed_questions() -> list[Question]:
    """One image, several, none; images at either end and side by side; one image shared by two prompts."""
    cat, dog, line = noise(300, 200, seed=1), noise(200, 130, seed=2), noise(900, 20, seed=3)
    return [
        Question((*text(1, 20), IMAGE, *text(2, 9)), (cat,)),
        Question(text(3, 45)),
        Question((IMAGE, IMAGE, *text(4, 12), IMAGE, *text(5, 3)), (dog, cat, line)),
        Question((*text(1, 20), IMAGE), (cat,)),
        Question((IMAGE,), (line,)),
    ]


def generate(backend: EngineBackend, questions: Sequence[Question]) -> list[Generation]:
    return backend.generate_many([q.for_vllm() for q in questions], COUNT)


def test_the_questions_are_cut_inside_images(oracle: Oracle) -> None:
    """Chunks of 17 and blocks of 16 tokens: the images are longer."""
    assert [len(oracle.expanded(q)) for q in mixed_questions()] == [76, 45, 113, 67, 25]


@pytest.mark.parametrize(("runner", "chunk"), [("V1", 1024), ("V1", 40), ("V1", 17), ("V2", 40)])
def test_chunks_batches_and_prefix_hits(engine: Engine, oracle: Oracle, runner: str, chunk: int) -> None:
    questions = mixed_questions()
    with engine(oracle.directory, runner=runner, max_num_batched_tokens=chunk, **SMALL) as backend:
        poison(backend)
        oracle.check(generate(backend, questions), questions)
        cached = [backend.cached_tokens(q.for_vllm()) for q in questions]
        assert cached == [(len(oracle.expanded(q)) - 1) // BLOCK * BLOCK for q in questions]
        oracle.check(generate(backend, questions), questions)
        for question in reversed(questions):
            oracle.check(generate(backend, [question]), [question])


@pytest.mark.parametrize(("runner", "caching"), [("V1", True), ("V1", False), ("V2", True)])
def test_preempted_requests_resume(engine: Engine, oracle: Oracle, runner: str, caching: bool) -> None:
    questions = mixed_questions()
    options: dict[str, Any] = {"runner": runner, "enable_prefix_caching": caching, "max_num_batched_tokens": 150}
    with engine(oracle.directory, **options, **SMALL) as backend:
        poison(backend)
        preempt_all_every(backend, 4)
        preempted = preemptions(backend)
        oracle.check(generate(backend, questions), questions)
        assert len(preempted) >= 5


def test_equal_text_does_not_share_what_images_differ_in(engine: Engine, oracle: Oracle) -> None:
    one, other = (Question((*text(1, 20), IMAGE, *text(2, 9)), (noise(200, 120, seed=seed),)) for seed in (1, 5))
    assert oracle.expanded(one) == oracle.expanded(other)
    with engine(oracle.directory, **SMALL) as backend:
        oracle.check(generate(backend, [one]), [one])
        assert backend.cached_tokens(one.for_vllm()) == 48
        assert backend.cached_tokens(other.for_vllm()) <= 20  # at most the text before the image
        oracle.check(generate(backend, [other, one]), [other, one])


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_replay_keeps_what_reaches_past_an_image(engine: Engine, oracle: Oracle, runner: str) -> None:
    questions = mixed_questions()
    with engine(oracle.directory, replay=True, runner=runner, **SMALL) as backend:
        poison(backend)
        assert model_of(backend).replay
        first = generate(backend, questions)
        oracle.check(first, questions, replay=True)
        again = generate(backend, questions)
        assert [a.ids for a in again] == [f.ids for f in first]


def test_an_image_is_not_cut_when_vllm_is_told_so(engine: Engine, oracle: Oracle) -> None:
    """V4.1 allows the cut, so vLLM's switch is off unless it is given."""
    questions = mixed_questions()
    with engine(oracle.directory, disable_chunked_mm_input=True, max_num_batched_tokens=128, **SMALL) as backend:
        starts: list[int] = []
        original = backend.scheduler.schedule

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            starts.extend(output.scheduled_cached_reqs.num_computed_tokens)
            return output

        backend.scheduler.schedule = recorded
        oracle.check(generate(backend, questions), questions)
    assert set(starts) & set(range(1, 45))


@pytest.mark.parametrize("options", [{"limit_mm_per_prompt": {"image": 0}}, {"language_model_only": True}], ids=str)
def test_without_images_it_is_a_text_model(engine: Engine, oracle: Oracle, options: dict[str, Any]) -> None:
    question, picture = mixed_questions()[1], mixed_questions()[0]
    with engine(oracle.directory, **options, **SMALL) as backend:
        assert not hasattr(model_of(backend), "vision")
        oracle.check(generate(backend, [question]), [question])
        with pytest.raises(ValueError, match="text-only"):
            generate(backend, [picture])
        oracle.check(generate(backend, [question]), [question])


def test_more_images_than_allowed(engine: Engine, oracle: Oracle) -> None:
    from vllm.exceptions import VLLMValidationError

    questions = mixed_questions()
    with engine(oracle.directory, limit_mm_per_prompt={"image": 2}, **SMALL) as backend:
        with pytest.raises(VLLMValidationError, match="At most 2 image"):
            generate(backend, [questions[2]])
        oracle.check(generate(backend, questions[:2]), questions[:2])


def test_image_tokens_without_an_image(engine: Engine, oracle: Oracle) -> None:
    """Ids that a client writes by hand are image tokens with the embedding of their row."""
    question = Question((*text(1, 5), IMAGE, IMAGE, *text(2, 5)))
    with engine(oracle.directory, **SMALL) as backend:
        answer = backend.generate(question.ids, COUNT)
        want = oracle.text.forward([*question.ids, *answer.ids[:-1]]).logits[len(question.ids) - 1 :]
        assert answer.logits is not None and float((answer.logits - want).abs().max()) <= MAX_ABS


def test_drafts_after_images(engine: Engine, tmp_path: Path) -> None:
    """DSpark's drafts, some of which the target takes, leave its answers as they are."""
    oracle, questions = write_oracle(tmp_path / "tiny", num_nextn_predict_layers=2), mixed_questions()
    answers = [
        oracle.text.greedy(oracle.expanded(q), COUNT, images=[oracle.vision.span(image) for image in q.images])
        for q in questions
    ]
    foresee(oracle.directory, [[q.ids[-1], *answer] for q, answer in zip(questions, answers, strict=True)], forget=6)
    options = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 4}, "disable_log_stats": False}
    with engine(oracle.directory, runner="V2", max_num_batched_tokens=64, **options, **SMALL) as backend:
        poison(backend)
        for _ in range(2):
            found = generate(backend, questions)
            assert [f.ids for f in found] == answers
            oracle.check(found, questions)
        metrics = {metric.name: metric for metric in backend._llm.get_metrics()}
        assert metrics["vllm:spec_decode_num_accepted_tokens"].value > 0
