"""Decisions of the controller: whom it drafts for, what it verifies, and when it does neither."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_vllm.spec_decode.controller import Controller, Form
from deepinfer_vllm.spec_decode.cost_table import CostTable

SIZES = (1, 8, 64, 256, 1024, 2048)


@dataclass(frozen=True)
class Choice:
    form: Form = "early-stop"


def costs(per_token_s: float, draft_s: float = 0.001) -> CostTable:
    return CostTable.measured(
        [(tokens, 0, 0.02 + per_token_s * tokens) for tokens in SIZES], [(1, 0, draft_s), (256, 0, draft_s)]
    )


def full(requests: int, chance: float) -> tuple[np.ndarray, np.ndarray]:
    return np.full((requests, 5), chance), np.full(requests, 5)


def test_cheap_tokens_are_verified_and_dear_ones_are_not() -> None:
    confidences, scheduled = full(8, 0.8)
    cheap = Controller(None, costs(1e-6), Choice()).plan(confidences, scheduled, 8, 0, 8)
    assert cheap.drafts.tolist() == [5] * 8 and cheap.drafting
    dear = Controller(None, costs(0.1), Choice()).plan(confidences, scheduled, 8, 0, 8)
    assert dear.drafts.tolist() == [0] * 8 and not dear.drafting


def test_fixed_verifies_all_whatever_it_costs() -> None:
    controller = Controller(None, costs(0.1), Choice("fixed"))
    plan = controller.plan(*full(8, 0.1), 8, 0, 8)
    assert plan.budget == 40 and plan.drafting and controller.wants_drafts(8, 0)


def test_drafting_ends_under_load_and_returns_without_a_probe() -> None:
    controller = Controller(None, costs(2e-4, draft_s=0.01), Choice())
    for _ in range(50):
        controller.plan(*full(8, 0.6), 8, 0, 8)
    assert controller.wants_drafts(8, 0)
    assert not controller.wants_drafts(256, 0)
    assert controller.wants_drafts(8, 0)
