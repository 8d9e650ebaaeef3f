"""How long rows are kept: long enough, and never so that rows of two widths are kept equally long."""

from __future__ import annotations

import itertools

import pytest

from deepinfer_vllm.models.deepseek_v41.windows import Windows
from small_model import both_configs

SPANS = list(itertools.product([1, 2, 3, 4, 16], [2, 3, 4, 5, 16]))


@pytest.mark.parametrize(("window", "ngram"), SPANS)
def test_long_enough_and_apart(window: int, ngram: int) -> None:
    config, _ = both_configs(sliding_window=window, engram_max_ngram_size=ngram)
    for replayed in (0, window):
        plan = Windows.plan(config, replayed)
        assert plan.rebuilt == window
        assert plan.attention == window + replayed
        assert plan.open_group >= 2 + replayed
        assert plan.history >= ngram + replayed
        assert len({plan.open_group, plan.history, plan.attention}) == 3
        assert plan.rebuilt not in (plan.open_group, plan.history)


def test_no_longer_than_needed() -> None:
    config, _ = both_configs(sliding_window=16, engram_max_ngram_size=4)
    assert Windows.plan(config, 0) == Windows(16, 16, 2, 4)
    assert Windows.plan(config, 16) == Windows(16, 32, 18, 20)
