"""The model against the float64 reference on checkpoints of random topology, whole and in chunks."""

from pathlib import Path

import pytest

from reference import load
from topologies import assert_same, bare_model, covered, write_random

SEEDS = [5, 6, 7, 10, 14, 16, 23, 25, 31, 32, 38, 56]
EVERYTHING = {
    "no compressed layer",
    "candidates that bite",
    "a newer KV source under the mask",
    "both ratios",
    "three KV sources",
    "compressed first layer",
    "Engram in layer 0",
    "Engram in the last layer",
    "only 2-grams",
    "no Engram",
    "odd window",
    "two streams",
    "one expert a token",
}


def test_the_seeds_cover_every_kind_of_topology() -> None:
    assert set().union(*(covered(seed) for seed in SEEDS)) == EVERYTHING


@pytest.mark.parametrize("seed", SEEDS)
def test_as_the_reference(seed: int, tmp_path: Path) -> None:
    ids = write_random(tmp_path, seed)
    expected = load(tmp_path).forward(ids)
    with bare_model(tmp_path) as model:
        for chunk in (None, 17, 5):
            assert_same(model.prefill(ids, chunk), expected)
