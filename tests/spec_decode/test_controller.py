"""Decisions of the controller: whom it drafts for, what it verifies, and when it does neither."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.controller import Controller
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.looks import ARRIVED, READING
from deepinfer_vllm.spec_decode.settings import Form, Settings

SIZES = (1, 8, 64, 256, 1024, 2048)


def settings(form: Form = "early-stop") -> Settings:
    return Settings(form, calibration="off", record="", grammar=False)


def costs(per_token_s: float, draft_s: float = 0.001) -> CostTable:
    return CostTable.measured(
        [(tokens, 0, 0.02 + per_token_s * tokens) for tokens in SIZES], [(1, 0, draft_s), (256, 0, draft_s)]
    )


def full(requests: int, chance: float) -> tuple[np.ndarray, np.ndarray]:
    return np.full((requests, 5), chance), np.full(requests, 5)


def test_cheap_tokens_are_verified_and_dear_ones_are_not() -> None:
    confidences, scheduled = full(8, 0.8)
    cheap = Controller(None, costs(1e-6), settings()).plan(confidences, scheduled, 8, 0, 8)
    assert cheap.drafts.tolist() == [5] * 8 and cheap.drafting
    dear = Controller(None, costs(0.1), settings()).plan(confidences, scheduled, 8, 0, 8)
    assert dear.drafts.tolist() == [0] * 8 and not dear.drafting


def test_fixed_verifies_all_whatever_it_costs() -> None:
    controller = Controller(None, costs(0.1), settings("fixed"))
    plan = controller.plan(*full(8, 0.1), 8, 0, 8)
    assert plan.budget == 40 and plan.drafting and controller.wants_drafts(8, 0)


def stepped(controller: Controller, chance: float, requests: int, steps: int, true: CostTable) -> list[bool]:
    """Steps of a batch whose drafts have this chance, at the true costs; which of them were drafted for."""
    drafted, have = [], False
    for _ in range(steps):
        if planned := have:
            plan = controller.plan(*full(requests, chance), requests, 0, requests)
            controller.verified(*full(requests, chance), np.zeros(requests, dtype=np.int64))
            tokens, have = requests + plan.budget, plan.drafting
        else:
            tokens, have = requests, controller.wants_drafts(requests, 0)
        seconds = float(true.verify_s(tokens, tokens, 0)[0])
        if planned:
            controller.observe_verify(tokens, 0, seconds)
        else:
            controller.observe_plain(requests, 0, seconds)
        if have:
            controller.observe_draft(requests, 0, true.draft_s(requests, 0))
        drafted.append(have)
    return drafted


def quiet(controller: Controller, chance: float, requests: int, steps: int, true: CostTable) -> list[bool]:
    """The same, with outcomes that are as likely as was said."""
    controller.verified = lambda *_: None  # type: ignore[method-assign]
    return stepped(controller, chance, requests, steps, true)


def test_drafting_ends_under_load_and_returns_at_once() -> None:
    controller = Controller(None, costs(2e-4, draft_s=0.01), settings())
    for _ in range(50):
        controller.plan(*full(8, 0.6), 8, 0, 8)
    assert [controller.wants_drafts(requests, 0) for requests in (8, 256, 8)] == [True, False, True]


@pytest.mark.parametrize(("chance", "requests"), [(0.05, 64), (0.3, 256), (0.7, 16)])
def test_looks_at_the_other_choice_take_a_bounded_part_of_time(chance: float, requests: int) -> None:
    true = costs(2e-4, draft_s=0.01)
    controller = Controller(None, costs(2e-4, draft_s=0.01), settings())
    drafted = quiet(controller, chance, requests, 12_000, true)
    wanted = drafted.count(True) > 6000
    others = drafted[100:].count(not wanted)
    drafts, tokens = controller._expected.tokens(requests)
    without = float(true.verify_s(requests, requests, 0)[0])
    seconds = true.verify_at_s(requests + drafts, 0) + true.draft_s(requests, 0)
    gain = float((tokens / seconds).max()) * without / requests - 1.0
    assert wanted == (gain > 0.0)
    # A step without drafts loses its time less that of its tokens at the best rate; one with drafts one each at least.
    lost = gain / (1.0 + gain) if wanted else (seconds / without - tokens / requests)[drafts >= requests].min()
    lost = min(lost, max(gain / (1.0 + gain), true.draft_s(requests, 0) / without))  # of a block that is only read
    assert others >= 5 and others * lost <= 2 * 0.001 * 12_000


def test_it_comes_back_when_drafts_become_good() -> None:
    true = costs(2e-4, draft_s=0.01)
    controller = Controller(None, true, settings())
    assert not quiet(controller, 0.02, 64, 3000, true)[-1]
    drafted = quiet(controller, 0.9, 64, 6000, true)
    assert sum(drafted[-200:]) >= 190


def test_new_requests_are_looked_at_soon_and_at_a_bounded_cost() -> None:
    """Texts become easy as requests come, with the same load and costs; then they do not, and more requests come."""
    true = costs(2e-4, draft_s=0.01)
    without = float(true.verify_s(64, 64, 0)[0])
    period = true.draft_s(64, 0) / without / READING / ARRIVED
    controller = Controller(None, true, settings())
    assert not quiet(controller, 0.02, 64, 3000, true)[-1]
    for _ in range(64):
        controller.came()
    drafted = quiet(controller, 0.9, 64, 2 * int(period), true)
    assert sum(drafted) >= 0.9 * period
    controller = Controller(None, true, settings())
    quiet(controller, 0.02, 64, 3000, true)
    drafted = []
    for _ in range(40):
        for _ in range(64):
            controller.came()
        drafted += quiet(controller, 0.02, 64, 100, true)
    assert 5 <= sum(drafted) <= 4000 / period + 10, "a look every so many steps, and those that are paid for anyway"


def test_texts_that_become_easy_are_read_of() -> None:
    """Nobody comes, and nothing is verified in vain: a block now and then is enough."""
    true = costs(2e-4, draft_s=0.01)
    period = int(true.draft_s(64, 0) / float(true.verify_s(64, 64, 0)[0]) / READING)
    controller = Controller(None, true, settings())
    assert not quiet(controller, 0.02, 64, 3000, true)[-1]
    assert sum(quiet(controller, 0.9, 64, 2 * period, true)) >= 0.9 * period


def test_ahead_of_drafts_it_learns_of_texts_from_blocks_that_were_read() -> None:
    controller = Controller(None, costs(2e-4, draft_s=0.01), settings("delayed"))
    low, high, scheduled = full(64, 0.02)[0], np.cumprod(full(64, 0.9)[0], axis=1), np.full(64, 5)
    for _ in range(3):
        drafting = controller.plan_ahead(low, scheduled, 64, 0, 64).drafting
    assert not drafting
    for _ in range(20_000):
        if controller.wants_drafts(64, 0) and not controller._trying:
            break
    assert not controller.plan_ahead(low, scheduled, 64, 0, 64).drafting, "the forecast of before"
    controller.drawn(high)
    assert controller.wants_drafts(64, 0)


def test_near_the_break_even_it_does_not_flap() -> None:
    true = costs(2e-4, draft_s=0.01)
    low, high = 0.02, 0.98
    for _ in range(30):
        chance = (low + high) / 2
        controller = Controller(None, true, settings())
        controller.plan(*full(64, chance), 64, 0, 64)
        low, high = (low, chance) if controller.wants_drafts(64, 0) else (chance, high)
    random = np.random.default_rng(1)
    controller = Controller(None, true, settings())
    turns, before = 0, True
    for _ in range(2000):
        wobble = chance + 0.0002 * random.standard_normal()
        controller.plan(*full(64, wobble), 64, 0, 64)
        turns += controller._drafting != before
        before = controller._drafting
    assert turns <= 4


def test_a_table_that_was_wrong_at_start_is_found_out() -> None:
    wrong, true = costs(5e-4, draft_s=0.005), costs(1e-5, draft_s=0.005)
    controller = Controller(None, wrong, settings())
    assert not controller.plan(*full(32, 0.5), 32, 0, 32).drafting
    drafted = quiet(controller, 0.5, 32, 6000, true)
    assert sum(drafted[-200:]) >= 190
    assert controller.plan(*full(32, 0.5), 32, 0, 32).budget > 60


def test_no_more_drafts_than_fit() -> None:
    for form in ("early-stop", "delayed", "fixed"):
        plan = Controller(None, costs(1e-6), settings(form)).plan(*full(8, 0.9), 8, 0, 8, most=13)
        assert plan.budget == 13


@pytest.mark.parametrize("form", ["early-stop", "delayed", "fixed"])
def test_batches_without_drafts_or_requests_are_no_trouble(form: Form) -> None:
    controller = Controller(None, costs(1e-5), settings(form))
    none = controller.plan(np.full((3, 5), 0.8), np.zeros(3, dtype=np.int64), 2000, 10**6, 2)
    assert none.drafts.tolist() == [0, 0, 0]
    empty = controller.plan(np.zeros((0, 5)), np.zeros(0, dtype=np.int64), 0, 0, 0)
    assert empty.drafts.shape == (0,) and controller.wants_drafts(0, 0)


def test_a_delayed_budget_does_not_count_requests_of_which_nothing_is_known() -> None:
    controller = Controller(None, costs(2e-3), settings("delayed"))
    controller.plan(np.ones((8, 5)), np.full(8, 5), 8, 0, 8)
    assert not controller._expected.known
    controller.plan(*full(8, 0.5), 8, 0, 8)
    assert controller._expected.tokens(8)[1][-1] == pytest.approx(8 + 8 * sum(0.5**j for j in range(1, 6)))


def test_a_calibration_is_applied_before_what_is_learnt() -> None:
    sharper = Calibration((0.5,) * 5)
    controller = Controller(sharper, costs(2e-3), settings())
    said, scheduled = full(8, 0.6)
    by_hand = Controller(None, costs(2e-3), settings()).plan(sharper.apply(said), scheduled, 8, 0, 8)
    assert controller.plan(said, scheduled, 8, 0, 8).drafts.tolist() == by_hand.drafts.tolist()


def test_told_the_same_two_decide_the_same() -> None:
    pair = [Controller(None, costs(1e-4), settings()) for _ in range(2)]
    decided = []
    for controller in pair:
        random = np.random.default_rng(2)
        found = []
        for _ in range(300):
            confidences = random.random((16, 5)).astype(np.float32)
            plan = controller.plan(confidences, np.full(16, 5), 16, 10**5, 16)
            controller.verified(confidences, plan.drafts, random.integers(0, plan.drafts + 1))
            controller.observe_verify(16 + plan.budget, 10**5, float(random.random()))
            found.append((plan.drafts.tolist(), plan.drafting, plan.seconds))
        decided.append(found)
    assert decided[0] == decided[1]
