"""Whether a draft is verified may depend only on what was drawn before it, or outputs are no longer the target's.

A confidence at position j is computed from the drafts before j, so the decision about a draft at j may use confidences
of its request up to j and no later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_vllm.spec_decode.budget import allot, convex_floor, early_stop, filled, ranked, survival
from deepinfer_vllm.spec_decode.controller import Controller
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.settings import Settings

Decision = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Drafts to verify [R] from survivals [R, S] and seconds [n + 1]."""


def by_early_stop(alive: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    return allot(alive, early_stop(ranked(alive), len(alive), seconds))


def by_floor(alive: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    return allot(alive, filled(early_stop(ranked(alive), len(alive), convex_floor(seconds)), seconds))


def by_best_rate(alive: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The best of all budgets by the drafts' own survivals: what must not be done."""
    tokens = len(alive) + np.cumsum([0.0, *ranked(alive)])
    return allot(alive, int((tokens / seconds).argmax()))


DRAFT = {"a": Fraction(85, 100), "b": Fraction(15, 100)}
TARGET = {"a": Fraction(1, 2), "b": Fraction(1, 2)}


def chance_of_a(decision: Decision) -> Fraction:
    """That the first token written is `a`, exactly.

    One request, two drafts. The first is `a` or `b` as DRAFT says; the second is sure to be accepted behind `a` and
    sure not to be behind `b`. The second is worth its time only with the first, and the first alone is not: a rule that
    sees the second's confidence before it decides about the first has seen what the first is.
    """
    seconds = np.array([1.0, 1.8, 1.9])
    accepted = sum(min(DRAFT[token], TARGET[token]) for token in DRAFT)
    total = Fraction(0)
    for first, drawn in DRAFT.items():
        confidences = np.array([[float(accepted), 1.0 if first == "a" else 0.0]])
        if decision(survival(confidences, np.array([2])), seconds)[0] == 0:
            total += drawn * TARGET["a"]
            continue
        stands = min(Fraction(1), TARGET[first] / DRAFT[first])
        excess = {token: max(Fraction(0), TARGET[token] - DRAFT[token]) for token in DRAFT}
        total += drawn * ((first == "a") * stands + (1 - stands) * excess["a"] / sum(excess.values()))
    return total


@pytest.mark.parametrize("decision", [by_early_stop, by_floor])
def test_the_first_token_is_distributed_as_the_targets(decision: Decision) -> None:
    assert chance_of_a(decision) == TARGET["a"]


def test_the_best_budget_by_the_drafts_own_survivals_is_biased() -> None:
    assert chance_of_a(by_best_rate) == Fraction(575, 1000)


CONFIDENCES = st.lists(st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4), min_size=1, max_size=4)
RISES = st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.4, 2.0]), min_size=16, max_size=16)


@settings(deadline=None)
@given(CONFIDENCES, RISES, st.data())
@pytest.mark.parametrize("decision", [by_early_stop, by_floor])
def test_later_confidences_do_not_change_what_is_verified_before(
    decision: Decision, rows: list[list[float]], rises: list[float], data: st.DataObject
) -> None:
    confidences = np.array(rows)
    request = data.draw(st.integers(0, len(rows) - 1))
    position = data.draw(st.integers(0, 3))
    changed = confidences.copy()
    changed[request, position + 1 :] = data.draw(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3))[position:]
    scheduled = np.full(len(rows), 4)
    seconds = 1.0 + np.cumsum([0.0, *rises])[: confidences.size + 1]
    first, second = (decision(survival(each, scheduled), seconds) for each in (confidences, changed))
    assert (first[request] > position) == (second[request] > position)


@settings(deadline=None)
@given(CONFIDENCES, st.integers(0, 16), st.data())
def test_nor_where_the_budget_is_given(rows: list[list[float]], budget: int, data: st.DataObject) -> None:
    confidences = np.array(rows)
    request, position = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 3))
    changed = confidences.copy()
    changed[request, position + 1 :] = 1.0 - changed[request, position + 1 :]
    scheduled = np.full(len(rows), 4)
    first, second = (allot(survival(each, scheduled), budget)[request] > position for each in (confidences, changed))
    # A draft that is sure to be rejected is not verified, whatever is left of the budget.
    assert first == second


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 64]))
def test_a_controller_with_a_history_keeps_to_it(seed: int, padded_to: int) -> None:
    random = np.random.default_rng(seed)
    verify = [(size, 0, 0.01 * (1.0 + (size / 20) ** 1.5)) for size in (4, 8, 16, 24, 32, 64)]
    pair = [
        Controller(
            None, CostTable.measured(verify, [(1, 0, 1e-3)], padded_to), Settings("early-stop", "off", "", False)
        )
        for _ in range(2)
    ]
    scheduled = np.full(4, 4)
    for _ in range(8):
        confidences = random.random((4, 4)) ** 0.3
        changed = confidences.copy()
        request, position = int(random.integers(4)), int(random.integers(4))
        changed[request, position + 1 :] = random.random(3 - position)
        first, second = (
            controller.plan(each, scheduled, 4, 0, 4).drafts[request] > position
            for controller, each in zip(pair, (confidences, changed), strict=True)
        )
        assert first == second
        for controller in pair:  # the same outcomes: what is decided later may depend on all that was drawn before
            controller.verified(confidences, scheduled, np.full(4, 2))
            controller.observe_verify(20, 0, 0.02)
