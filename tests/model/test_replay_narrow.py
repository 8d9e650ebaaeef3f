"""Which tokens decoder-side replay keeps, and from where their windows reach."""

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.replay import BatchFacts, cached_tokens, narrow
from small_model import make_step

WINDOW = 4


def outcome(
    ranges: list[tuple[int, int]], keep_all: list[bool] | None = None, first: list[int] | None = None
) -> tuple[list[int], list[int], list[tuple[int, int]]] | None:
    """(rows kept, floors, spans) or None."""
    count = len(ranges)
    facts = BatchFacts(keep_all or [False] * count, first or [0] * count)
    narrowed = narrow(make_step(ranges, {}), WINDOW, facts)
    if narrowed is None:
        return None
    step, rows = narrowed
    assert step.window_floor is not None and step.window_floor.dtype == rows.dtype == torch.int64
    assert step.positions.tolist() == [make_step(ranges, {}).positions.tolist()[row] for row in rows.tolist()]
    return rows.tolist(), step.window_floor.tolist(), step.spans


@pytest.mark.parametrize("ranges", [[(0, 1)], [(0, 4)], [(9, 10)], [(0, 3), (17, 18), (5, 9)]])
def test_nothing_to_skip(ranges: list[tuple[int, int]]) -> None:
    assert outcome(ranges) is None


def test_a_long_prompt_keeps_its_last_window() -> None:
    assert outcome([(0, 10)]) == ([6, 7, 8, 9], [6], [(0, 4)])
    assert outcome([(0, 5)]) == ([1, 2, 3, 4], [1], [(0, 4)])


def test_a_later_chunk_keeps_its_last_window() -> None:
    assert outcome([(10, 20)]) == ([6, 7, 8, 9], [16], [(0, 4)])


def test_a_chunk_no_longer_than_the_window_is_kept_whole() -> None:
    """Its windows reach into the chunk before, whose last rows are kept too, so there is no floor."""
    assert outcome([(10, 13)]) is None


def test_requests_are_narrowed_apart() -> None:
    rows, floors, spans = outcome([(0, 6), (8, 9), (20, 27), (0, 2)]) or ([], [], [])
    assert rows == [2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 15]
    assert floors == [2, 0, 23, 0]
    assert spans == [(0, 4), (4, 5), (5, 9), (9, 11)]


def test_prompt_logprobs_want_every_row() -> None:
    assert outcome([(0, 10)], keep_all=[True]) is None
    rows, floors, spans = outcome([(0, 10), (0, 10)], keep_all=[True, False]) or ([], [], [])
    assert rows == [*range(10), 16, 17, 18, 19] and floors == [0, 6] and spans == [(0, 10), (10, 14)]


def test_a_prefix_hit_is_a_floor_of_its_own() -> None:
    """Rows before the hit were another run's and may be skipped ones: nothing may look past the first computed."""
    assert outcome([(10, 12)], first=[10]) == ([0, 1], [10], [(0, 2)])
    assert outcome([(12, 13)], first=[10]) == ([0], [10], [(0, 1)])
    assert outcome([(10, 30)], first=[10]) == ([16, 17, 18, 19], [26], [(0, 4)])
    assert outcome([(10, 30)], keep_all=[True], first=[10]) == (list(range(20)), [10], [(0, 20)])


def test_a_request_without_tokens() -> None:
    assert outcome([(0, 6), (3, 3)]) == ([2, 3, 4, 5], [2, 0], [(0, 4), (4, 4)])


def cached(ranges: list[tuple[int, int]], until: list[int]) -> list[bool] | None:
    none = [0] * len(ranges)
    found = cached_tokens(make_step(ranges, {}), BatchFacts([False] * len(ranges), none, until))
    return None if found is None else found.tolist()


def test_tokens_of_a_hit_lie_in_shared_blocks() -> None:
    assert cached([(4, 7)], [8]) == [True, True, True]
    assert cached([(0, 2), (6, 10), (8, 9)], [0, 8, 8]) == [False, False, True, True, False, False, False]


def test_nothing_is_shared_without_a_hit_or_past_it() -> None:
    assert cached([(0, 5), (9, 10)], [0, 0]) is None
    assert cached([(8, 12)], [8]) is None
    assert cached([(8, 12)], []) is None
