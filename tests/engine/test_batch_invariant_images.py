"""VLLM_BATCH_INVARIANT=1 with images: the same bits however many are seen at once, from caches, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engine.foresight import foresee
from engine.harness import model_of
from engine.invariant import Answer, Asked, Case, alone, greedy, preempting, started, switched_on
from engine.kvstore import forget, tier_of
from engine.test_images import Oracle, mixed_questions, write_oracle

ENGINES = [("V1", "float32"), ("DSpark", "float32"), ("V2", "bfloat16")]
IMAGES = 3
"""Different ones in all questions."""


@dataclass
class Seeing(Case):
    """An engine, and how many images each step's tower has been given."""

    towers: list[int]

    def computed(self) -> int:
        """Images since the last call."""
        count = sum(self.towers)
        self.towers.clear()
        return count

    def forget_images(self) -> None:
        """Empty the encoder cache."""
        self.backend._llm.llm_engine.engine_core.reset_encoder_cache()


def questions() -> list[Asked]:
    given: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"logprobs": 1, "temperature": 0.8, "seed": 3},
        {"logprobs": 1, "prompt_logprobs": 1},
        {"logprobs": 1, "temperature": 0.9, "seed": 4},
        {"logprobs": 3},
    ]
    return [
        (question.for_vllm(), {"detokenize": False, **parameters})
        for question, parameters in zip(mixed_questions(), given, strict=True)
    ]


@pytest.fixture(scope="module", autouse=True)
def invariant() -> Iterator[None]:
    with switched_on():
        yield


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return write_oracle(tmp_path_factory.mktemp("seeing") / "tiny", num_nextn_predict_layers=2)


@pytest.fixture(scope="module")
def greedy_ones() -> list[Answer]:
    """What the first engine answers, in float32."""
    return []


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def case(
    request: pytest.FixtureRequest,
    oracle: Oracle,
    tmp_path_factory: pytest.TempPathFactory,
    greedy_ones: list[Answer],
) -> Iterator[Seeing]:
    kind, dtype = request.param
    asked = questions()
    if kind == "DSpark":  # drafts of random weights would all fall
        ends = [prompt["prompt_token_ids"][-1] for prompt, given in asked if "seed" not in given]
        foresee(
            oracle.directory, [[end, *answer[0][0][0]] for end, answer in zip(ends, greedy_ones, strict=True)], forget=6
        )
    root = tmp_path_factory.mktemp("store") / "root"
    with started(oracle.directory, root, kind, dtype, max_model_len=1024) as backend:
        model, towers = model_of(backend), list[int]()
        embed = model.embed_multimodal

        def counted(**inputs: Any) -> Any:
            towers.append(len(inputs["llm_grid"]))
            return embed(**inputs)

        model.embed_multimodal = counted
        first = alone(backend, asked, "first")
        if dtype == "float32":
            greedy_ones.extend([] if greedy_ones else greedy(asked, first))
            assert greedy(asked, first) == greedy_ones
        yield Seeing(kind, backend, asked, first, towers)


def test_together_in_chunks_of_any_size_anew_and_from_caches(case: Seeing) -> None:
    """Each image computed among the others; known to the encoder cache; its rows in the prefix cache; in the store."""
    for chunk in (1024, 64, 17):
        salt = f"together {chunk}"
        case.scheduled(chunk)
        case.forget_images()
        case.computed()
        case.check_together(salt, "anew")
        assert case.computed() == IMAGES
        case.check_together(f"{salt} again", "encoder cache")
        assert case.computed() == 0
        case.forget_images()
        case.check_together(salt, "prefix cache")
        forget(case.backend)
        hits = tier_of(case.backend)._store.stats().hits
        case.check_together(salt, "store")
        assert tier_of(case.backend)._store.stats().hits > hits


def test_alone_in_chunks_and_in_another_order(case: Seeing) -> None:
    case.scheduled(17)
    case.forget_images()
    case.check_alone("in chunks")
    other = Case(case.kind, case.backend, case.asked[::-1], case.wanted[::-1])
    case.forget_images()
    case.scheduled(150)
    other.check_together("in another order")


def test_preempted(case: Seeing) -> None:
    """Also inside images."""
    for chunk, steps in ((150, 4), (40, 15)):
        case.scheduled(chunk)
        case.forget_images()
        with preempting(case.backend, steps) as ids:
            case.check_together(f"preempted {chunk}")
        assert ids


def test_drafts_stood(case: Seeing) -> None:
    """Where there are any, or nothing was shown of them."""
    accepted = {metric.name: metric for metric in case.backend._llm.get_metrics()}.get(
        "vllm:spec_decode_num_accepted_tokens"
    )
    assert (accepted is not None and accepted.value > 0) == (case.kind == "DSpark")
