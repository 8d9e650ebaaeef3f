"""The running error is that of the latest drafts, computed at once."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_vllm.spec_decode.calibration import Calibration, errors
from deepinfer_vllm.spec_decode.drift import Drift


def stream(count: int, power: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidences [N, 4] of tokens that stand with their `power`-th power as chance; verified to random lengths."""
    rng = np.random.default_rng(seed)
    confidences = rng.random((count, 4))
    drafted = rng.integers(0, 5, count)
    accepted = np.minimum(np.cumprod(rng.random((count, 4)) < confidences**power, axis=1).sum(axis=1), drafted)
    return confidences, drafted, accepted


def feed(drift: Drift, confidences: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, batch: int) -> None:
    confidences = np.where(np.arange(4) < drafted[:, None], confidences, np.nan)  # not to be read beyond
    for at in range(0, len(drafted), batch):
        drift.record(confidences[at : at + batch], drafted[at : at + batch], accepted[at : at + batch])


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_it_is_the_error_of_all_drafts_while_they_fit_the_window(batch: int) -> None:
    drift = Drift(Calibration.identity(4), window=10_000)
    drafts = stream(1000, 1.3, seed=0)
    feed(drift, *drafts, batch)
    want = errors(*drafts)
    assert drift.by_position == pytest.approx(want, rel=1e-9)
    counts = [(drafts[1] > k).sum() for k in range(4)]
    assert drift.error == pytest.approx(np.average(want, weights=counts), rel=1e-9)


def test_old_drafts_are_forgotten_and_new_ones_are_seen() -> None:
    drift = Drift(Calibration.identity(4), window=20_000)
    feed(drift, *stream(40_000, 1.0, seed=1), batch=64)
    assert drift.error is not None and drift.error < 0.02
    feed(drift, *stream(40_000, 2.0, seed=2), batch=64)
    bad = errors(*stream(100_000, 2.0, seed=3))
    assert drift.by_position == pytest.approx(bad, abs=0.02)


def test_nothing_verified_yet() -> None:
    drift = Drift(Calibration.identity(4))
    assert drift.error is None
    drift.record(np.full((2, 4), np.nan), np.zeros(2, int), np.zeros(2, int))
    drift.record(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0, int))
    assert drift.error is None and drift.by_position == [0.0] * 4


def test_a_window_of_one_draft() -> None:
    drift = Drift(Calibration.identity(2), window=1)
    drift.record(np.array([[0.9, 0.5]]), np.array([2]), np.array([0]))
    assert drift.by_position == pytest.approx([0.9, 0.45])
    drift.record(np.array([[0.8, 0.5]]), np.array([1]), np.array([1]))
    assert drift.by_position == pytest.approx([0.2, 0.0])


def test_it_is_the_error_of_calibrated_confidences() -> None:
    calibration, told = Calibration((2.0, 0.5, 1.0, 3.0)), []
    drift = Drift(calibration, window=10_000, tell=told.append)
    drafts = stream(640, 1.0, seed=4)
    feed(drift, *drafts, batch=5)
    want = errors(calibration.apply(drafts[0]), *drafts[1:])
    assert drift.by_position == pytest.approx(want, rel=1e-9)
    assert len(told) == 8 and told[-1] == drift.error
