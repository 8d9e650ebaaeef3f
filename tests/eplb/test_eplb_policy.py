"""Placements hold every expert, keep what can stay, and honour the bound on moves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_vllm.eplb.errors import EplbError
from deepinfer_vllm.eplb.moe_lb import moe_lb, rank_loads
from deepinfer_vllm.eplb.policy import place

shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 3))


@given(shapes, st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 50.0]))
def test_every_expert_has_a_slot_and_moves_are_bounded(
    shape: tuple[int, int, int, int, int], seed: int, load: float
) -> None:
    steps, layers, experts, ranks, more = shape
    physical = (-(-experts // ranks) + more) * ranks
    random = np.random.default_rng(seed)
    first, second = random.poisson(load * random.gamma(0.3, size=(2, 1, layers, experts)), (2, steps, layers, experts))
    before = place(first, ranks, physical)
    after = place(second, ranks, physical, current=before, max_moves=physical // 2)
    for placement in (before, after):
        assert placement.shape == (layers, physical)
        assert placement.dtype == np.int32
        assert all(set(layer) == set(range(experts)) for layer in placement.tolist())
    assert (after != before).sum() <= physical // 2
    assert (place(first, ranks, physical) == before).all()
    loads = rank_loads(second, after, ranks)
    assert np.allclose(loads.sum(-1), second.sum(-1))
    assert moe_lb(loads) >= 1 - 1e-9


@pytest.mark.parametrize(
    ("counts", "ranks", "physical", "said"),
    [
        (np.zeros((2, 3)), 1, 3, "counts have shape [2, 3]"),
        (np.full((1, 1, 4), np.nan), 2, 4, "NaN"),
        (np.full((1, 1, 4), -1), 2, 4, "negative"),
        (np.zeros((1, 1, 4)), 2, 5, "5 slots on 2 ranks"),
        (np.zeros((1, 1, 4)), 1, 3, "3 slots on 1 ranks"),
    ],
)
def test_impossible_wishes_are_refused_in_one_line(counts: np.ndarray, ranks: int, physical: int, said: str) -> None:
    with pytest.raises(EplbError) as error:
        place(counts, ranks, physical)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
