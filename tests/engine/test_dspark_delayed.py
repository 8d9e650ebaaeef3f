"""DSpark decided before drafts are drawn, from what arrives late: the target's own answers, and it learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.spec_decode.arrivals import HostMoment, Queue
from deepinfer_vllm.spec_decode.controller import Controller
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.device_times import DeviceTimes
from deepinfer_vllm.spec_decode.shared_times import SharedTimes
from engine.harness import preempt_all_every
from engine.test_dspark import COUNT, Case, accepted, make_case, start
from engine.whims import runner_of, whims


class LateMoment(HostMoment):
    """The device has passed it when it was asked three times, or waited for."""

    asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 3

    def synchronize(self) -> None:
        self.asked = 3


def late(verifier: Any) -> None:
    """From now on what the verifier learns of a step arrives steps later, as on a device that lags behind.

    Its steps take a millisecond of a clock of their own, and all drafts are worth that.
    """
    clock, settings = iter(range(1, 10**9)), verifier.controller.settings
    verifier.queue = Queue(torch.device("cpu"), 64, lambda: LateMoment(lambda: 0.001 * next(clock)))
    costs = CostTable.measured([(1, 0, 0.001), (64, 0, 0.001)], [(1, 0, 0.00001), (64, 0, 0.00001)])
    verifier.controller = Controller(None, costs, settings)
    verifier.controller._worth = lambda *_: True
    verifier.times = DeviceTimes(SharedTimes(verifier.controller))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("dspark-delayed"))


@pytest.fixture(scope="module")
def backend(case: Case) -> Iterator[EngineBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        patch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", "delayed")
        backend = start(case, max_model_len=len(case.prompts[-1]) + COUNT)
    late(runner_of(backend).deepinfer_verifier)
    assert runner_of(backend).max_num_reqs <= 64
    yield backend
    backend.close()


def test_it_learns_from_what_arrives(case: Case, backend: EngineBackend) -> None:
    """Its own controller is told of costs, outcomes and confidences; what it records are the drafts' own."""
    runner = runner_of(backend)
    verifier, told, drawn = runner.deepinfer_verifier, [], {}
    learnt, drafted = verifier._learn, verifier.drafted

    def keep(batch: Any) -> None:
        probabilities = runner.speculator.draft_token_confidence_probs
        for row, name in enumerate(batch.req_ids):
            drawn.setdefault(name, []).append(probabilities[row].tolist())
        drafted(batch)

    def learn(outcome: Any) -> None:
        told.append(outcome)
        learnt(outcome)

    verifier._learn, verifier.drafted = learn, keep
    before = verifier.controller.costs.to_json()
    try:
        assert [f.ids for f in backend.generate_many(case.prompts, COUNT, logits=False)] == case.answers
    finally:
        verifier._learn, verifier.drafted = learnt, drafted
    after = verifier.controller.costs.to_json()
    assert after["verify"]["observed"] > before["verify"]["observed"]
    assert after["draft"]["observed"] > before["draft"]["observed"]
    judged = [
        (name, confidences.tolist())
        for outcome in told
        for name, drafts, confidences in zip(outcome.step.ids, outcome.drafts, outcome.confidences, strict=True)
        if drafts and name in drawn
    ]
    assert judged and all(confidences in drawn[name] for name, confidences in judged)
    assert all((outcome.accepted <= outcome.drafts).all() for outcome in told)
    assert sum(int(outcome.accepted.sum()) for outcome in told) > 0 and verifier._forecast.known


def test_answers_are_the_targets_whatever_is_decided(case: Case, backend: EngineBackend) -> None:
    """In chunks, from the prefix cache, blocks left out at any time, requests preempted every few steps."""
    schedule = backend.scheduler.schedule
    with whims(backend) as dice:
        for preempted in (False, True):
            if preempted:
                preempt_all_every(backend, 4)
            assert [f.ids for f in backend.generate_many(case.prompts, COUNT, logits=False)] == case.answers
    backend.scheduler.schedule = schedule
    assert any(0 < sum(drafts) < sum(there) for there, drafts in dice.plans)
    assert any(0 in there and any(there) for there, _ in dice.plans), "some without drafts at hand, beside others"
    assert accepted(backend)[1] > 0
