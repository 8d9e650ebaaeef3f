"""Retries against a plain count over the last ten seconds."""

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.retry_budget import RetryBudget


def test_a_tenth_or_a_floor() -> None:
    budget = RetryBudget(share=0.1, floor=3)
    for _ in range(100):
        budget.request(50.0)
    assert sum(budget.take(50.5) for _ in range(50)) == 10
    for _ in range(9):
        budget.request(50.6)
    assert not budget.take(50.7)  # 10.9 are none more than 10
    assert not budget.take(59.9)
    assert sum(budget.take(60.0) for _ in range(50)) == 3


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 8)), max_size=80))
def test_as_a_plain_count(steps: list[tuple[bool, float]]) -> None:
    budget = RetryBudget(share=0.3, floor=1)
    now = 0.0
    requests: list[int] = []
    retries: list[int] = []
    for is_retry, wait in steps:
        now += wait
        recent = range(int(now) - 9, int(now) + 1)
        if is_retry:
            taken = sum(s in recent for s in retries)
            allowed = taken + 1 <= max(1, 0.3 * sum(s in recent for s in requests))
            assert budget.take(now) is allowed
            retries += [int(now)] * allowed
        else:
            budget.request(now)
            requests.append(int(now))


def test_a_clock_that_jumps_is_no_error() -> None:
    budget = RetryBudget()
    for now in (100.0, 3.0, 1e9, -5.0, 100.0):
        budget.request(now)
        budget.take(now)
    assert [budget.take(200.0) for _ in range(4)] == [True, True, True, False]
