"""DSpark that decides how much to draft and to verify: the target's own answers, whatever it decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint.backends import EngineBackend
from engine.test_dspark import COUNT, DRAFTS, Case, make_case, start


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("dspark-budget"))


@pytest.fixture(scope="module")
def backend(case: Case) -> Iterator[EngineBackend]:
    """The runner is not named: DSpark takes the one that has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        backend = start(case, max_model_len=len(case.prompts[-1]) + COUNT)
    yield backend
    backend.close()


def runner_of(backend: EngineBackend) -> Any:
    core = backend._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


class Listener:
    """Takes down what the speculator says of each step."""

    def __init__(self, speculator: Any) -> None:
        self.speculator, self.sampled, self.confidences = speculator, [], []

    def verified(self, num_sampled: torch.Tensor) -> None:
        self.sampled.append(num_sampled.tolist())

    def wants_drafts(self, batch: Any) -> bool:
        self.requests = batch.num_reqs
        return True

    def drafted(self) -> None:
        self.confidences.append(self.speculator.draft_token_confidence_probs[: self.requests].clone())


def test_every_block_has_confidences(case: Case, backend: EngineBackend) -> None:
    speculator = runner_of(backend).speculator
    listener = speculator.decider = Listener(speculator)
    try:
        assert backend.generate(case.prompts[1], COUNT).ids == case.answers[1]
    finally:
        speculator.decider = None
    assert sum(n for (n,) in listener.sampled) >= COUNT
    found = torch.cat(listener.confidences)
    assert found.shape == (len(listener.sampled), DRAFTS)
    assert ((found > 0) & (found < 1)).all() and found.std() > 0
