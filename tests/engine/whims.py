"""A controller that decides by dice, to see that decisions change no answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.spec_decode.controller import Plan


def runner_of(backend: EngineBackend) -> Any:
    core = backend._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


class Whims:
    """In place of a `Controller`: any number of each request's drafts, and a block in some steps only."""

    def __init__(self, controller: Any, drafting: float) -> None:
        self.settings, self.costs = controller.settings, controller.costs
        self._random, self._drafting = np.random.default_rng(0), drafting
        self.plans: list[tuple[list[int], list[int]]] = []
        """Of each step with drafts at hand: how many there were, and how many were verified."""

    def plan(self, confidences: Any, scheduled: Any, *sizes: int) -> Plan:
        drafts = self.drafts(scheduled)
        if scheduled.any():
            self.plans.append((scheduled.tolist(), drafts.tolist()))
        return Plan(drafts, 1.0, self.wants_drafts())

    plan_ahead = plan

    def survivals(self, confidences: Any) -> Any:
        return confidences

    def drafts(self, there: Any) -> Any:
        return self._random.integers(0, there + 1)

    def wants_drafts(self, *sizes: int) -> bool:
        return bool(self._random.random() < self._drafting)

    def verified(self, *outcome: Any) -> None:
        pass

    observe_verify = observe_plain = observe_draft = came = drawn = verified


@contextmanager
def whims(backend: EngineBackend, drafting: float = 0.7) -> Iterator[Whims]:
    """While this lasts the engine does what the dice say, and every batch is checked to be the same on both sides."""
    runner = runner_of(backend)
    verifier, prepare = runner.deepinfer_verifier, runner.prepare_inputs
    controller = verifier.controller

    def prepare_and_check(*args: Any) -> Any:
        batch = prepare(*args)
        host, device = batch.query_start_loc_np, batch.query_start_loc
        assert host.tolist() == device.tolist() and host[-1] == batch.num_tokens
        assert batch.cu_num_logits_np.tolist() == batch.cu_num_logits.tolist()
        assert len(batch.logits_indices) == batch.cu_num_logits_np[-1] == batch.num_draft_tokens + batch.num_reqs
        return batch

    verifier.controller, runner.prepare_inputs = Whims(controller, drafting), prepare_and_check
    try:
        yield verifier.controller
    finally:
        verifier.controller, runner.prepare_inputs = controller, prepare
