"""Looks at the choice that does not seem best: when they come, and what they may cost."""

from __future__ import annotations

import pytest

from deepinfer_vllm.spec_decode.looks import ARRIVED, EARLY, LOOKS, PROBING, READING, SOON, Look, Looks

STEP_S = 0.02


def without(looks: Looks, steps: int, loss: float, requests: int = 16, surprises: int = 0) -> list[bool]:
    return [looks.without_drafts(requests, STEP_S, loss, surprises) for _ in range(steps)]


def drafted(looks: Looks, steps: int, loss: float, draft_s: float = 0.1 * STEP_S, requests: int = 16) -> list[Look]:
    return [looks.with_drafts(requests, STEP_S, loss, draft_s, 0) for _ in range(steps)]


def test_the_other_choice_is_looked_at_soon_and_once_for_each_size() -> None:
    looks = Looks()
    for requests in (16, 31, 8):  # 31 are about as many as 16
        found = without(looks, 60, 0.5, requests)
        first = [number for number, look in enumerate(found) if look]
        assert first == ([] if requests == 31 else list(range(EARLY - 1, EARLY - 1 + SOON)))
    assert drafted(looks, 40, 0.5).count(Look.VERIFY) == SOON
    assert looks.count == 3 * SOON


@pytest.mark.parametrize("loss", [0.002, 0.05, 0.6])
def test_later_ones_are_paid_out_of_a_part_of_time(loss: float) -> None:
    looks = Looks()
    without(looks, 100, loss)
    steps = 20_000
    found = without(looks, steps, loss)
    paid = sum(found) * max(loss, 0.01)
    assert 0.7 * PROBING * steps <= paid <= PROBING * steps + LOOKS * loss
    for number, look in enumerate(found[:-LOOKS]):
        if look and not found[number - 1]:
            assert found[number : number + LOOKS] == [True] * LOOKS


def test_texts_are_read_now_and_then_and_sooner_once_others_have_come() -> None:
    looks, period = Looks(), round(0.1 / READING)
    drafted(looks, 100, 50.0)
    found = drafted(looks, 20 * period, 50.0)
    assert 19 <= found.count(Look.READ) <= 20 and not found.count(Look.VERIFY)
    for came, waited in ((15, period), (16, period / ARRIVED)):  # of the former there are not yet as many as there were
        while Look.READ not in drafted(looks, 1, 50.0):
            pass
        for _ in range(came):
            looks.came()
        assert drafted(looks, period, 50.0).index(Look.READ) + 1 == pytest.approx(waited, abs=1)


def test_costs_that_changed_are_looked_at_on_credit() -> None:
    looks = Looks()
    without(looks, 100, 0.3)
    assert not any(without(looks, 50, 0.3))
    assert without(looks, LOOKS + 1, 0.3, surprises=1) == [True] * LOOKS + [False]
    assert not any(without(looks, 500, 0.3, surprises=2)), "first what is owed is paid back"


def test_a_look_ends_where_its_choice_becomes_the_best() -> None:
    looks = Looks()
    assert without(looks, EARLY + 1, 0.5)[-2:] == [True, True]
    assert drafted(looks, 3, 0.5) == [Look.NONE] * 3
    assert not any(without(looks, 3, 0.5))
