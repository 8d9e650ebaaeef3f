"""Temperatures are those of the plain reference, recover what made the data, and are never worse than none."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import sts_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode import calibration
from deepinfer_vllm.spec_decode.calibration import Calibration, errors, fit, scaled
from deepinfer_vllm.spec_decode.calibration_error import BINS, expected_calibration_error

Drafts = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


def drafts(count: int, temperatures: list[float], seed: int = 0) -> Drafts:
    """Confidences of a head whose true chances are those at these temperatures, all verified, with what stood."""
    rng = np.random.default_rng(seed)
    positions = len(temperatures)
    confidences = rng.beta(2.5, 1.0, size=(count, positions))
    stands = rng.random((count, positions)) < scaled(confidences, np.array(temperatures))
    return confidences, np.full(count, positions), np.cumprod(stands, axis=1).sum(axis=1)


def as_lists(confidences: NDArray[np.float64], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> list:
    return list(zip(confidences.tolist(), drafted.tolist(), accepted.tolist(), strict=True))


def test_scaling_is_that_of_logits() -> None:
    calibrated = Calibration((0.5, 1.0, 3.0)).apply(np.array([[0.2, 0.2, 0.2], [1.0, 0.5, 0.0]]))
    want = [[sts_reference.sigmoid_of_logit(0.2, t) for t in (0.5, 1.0, 3.0)], [1.0, 0.5, 0.0]]
    assert calibrated == pytest.approx(np.array(want), rel=1e-12)


@pytest.mark.filterwarnings("error")
def test_any_temperature_of_any_confidence_is_a_chance() -> None:
    """A file may hold temperatures whose powers of both chances are 0 in float64."""
    confidences = np.array([[0.0, 1e-9, 0.3, 0.5, 0.999, 1.0]], np.float32)
    for temperature, want in ((1e-5, [0, 0, 0, 0.5, 1, 1]), (1e300, [0, 0.5, 0.5, 0.5, 0.5, 1])):
        assert Calibration((temperature,) * 6).apply(confidences) == pytest.approx(np.array([want]), abs=1e-12)


def test_identity_hands_back_what_it_is_given() -> None:
    confidences = np.random.default_rng(0).random((3, 2), np.float32)
    identity = Calibration.identity(2)
    assert identity.is_identity and identity.apply(confidences) is confidences


def test_other_numbers_of_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="3 draft positions, but a calibration of 2: fit it again"):
        Calibration((2.0, 2.0)).apply(np.ones((1, 3)))
    for bad in ((), (0.0,), (1.0, np.inf), (np.nan,)):
        with pytest.raises(ValueError, match="one positive number a draft position"):
            Calibration(bad)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 20))
def test_error_is_the_references(pairs: list[tuple[float, bool]], bins: int) -> None:
    predicted, happened = np.array([p for p, _ in pairs]), np.array([y for _, y in pairs])
    found = expected_calibration_error(predicted, happened, bins)
    assert found == pytest.approx(sts_reference.calibration_error(pairs, bins), abs=1e-12)


def test_error_of_nothing_and_of_the_ends() -> None:
    assert expected_calibration_error(np.array([]), np.array([], bool)) == 0.0
    assert expected_calibration_error(np.array([0.0, 1.0]), np.array([False, True])) == 0.0
    assert expected_calibration_error(np.array([0.0, 1.0]), np.array([True, False])) == 1.0


def test_fit_is_the_references() -> None:
    """On the drafts that are not held out; cut ones among them."""
    confidences, drafted, accepted = drafts(1600, [3.0, 0.4, 2.5])
    drafted = np.random.default_rng(1).integers(0, 4, 1600)
    accepted = np.minimum(accepted, drafted)
    found = fit(confidences, drafted, accepted, least=20)
    seen = np.arange(1600) % 4 != 3
    want = sts_reference.fit(as_lists(confidences[seen], drafted[seen], accepted[seen]), 3, 41, log(4.0), BINS)
    assert found.temperatures == pytest.approx(want, rel=1e-9)
    held = as_lists(confidences[~seen], drafted[~seen], accepted[~seen])
    for k in range(3):
        for ece, temperatures in ((found.ece_before, (1.0,) * 3), (found.ece_after, found.temperatures)):
            pairs = sts_reference.outcomes(held, list(temperatures[: k + 1]))
            assert ece[k] == pytest.approx(sts_reference.calibration_error(pairs, BINS), abs=1e-9)
    assert not found.is_identity
    assert found.outcomes == tuple(int((drafted > k).sum()) for k in range(3))


@pytest.mark.parametrize("true", [[1.0, 1.0, 1.0], [2.0, 1.5, 1.2], [0.5, 0.7, 1.0], [3.0, 0.5, 2.0]])
def test_known_temperatures_are_recovered(true: list[float]) -> None:
    found = fit(*drafts(200_000, true))
    assert np.abs(np.log(found.temperatures) - np.log(true)).max() < 0.1
    assert found.note == ""
    assert max(found.ece_after) < 0.01
    if true != [1.0, 1.0, 1.0]:
        assert np.mean(found.ece_after) < 0.3 * np.mean(found.ece_before)


def test_tokens_that_the_budget_cut_off_are_not_rejections() -> None:
    """Cut by what the confidences promise, as by a budget. Counted as rejections they would move every temperature."""
    true = [2.0, 1.5, 1.2, 1.0]
    confidences, drafted, accepted = drafts(200_000, true)
    promised = np.cumprod(confidences, axis=1)
    cut = (promised > np.random.default_rng(2).random((len(drafted), 1)) * 0.8).sum(axis=1)
    assert 0.2 < (cut < drafted).mean() < 0.9
    found = fit(confidences, cut, np.minimum(accepted, cut))
    assert np.abs(np.log(found.temperatures) - np.log(true)).max() < 0.12
    as_rejections = fit(confidences, drafted, np.minimum(accepted, cut))
    assert np.abs(np.log(as_rejections.temperatures) - np.log(true)).max() > 0.5


def test_a_cut_draft_that_failed_early_says_nothing_of_later_positions() -> None:
    """Its like that stood to the cut would be missing beside it."""
    confidences = np.full((4, 2), 0.5)
    drafted, accepted = np.array([2, 1, 1, 0]), np.array([2, 1, 0, 0])
    assert errors(confidences, drafted, accepted) == pytest.approx((abs(0.5 - 2 / 3), abs(0.25 - 1.0)))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.floats(0.2, 5), min_size=1, max_size=4), st.booleans())
def test_never_worse_than_no_temperatures(seed: int, true: list[float], by_request: bool) -> None:
    """On average over the positions that were fitted, of the drafts fitted as of those held out, even with few."""
    confidences, drafted, accepted = drafts(300, true, seed)
    requests = np.random.default_rng(seed).integers(0, 20, 300) if by_request else None
    found = fit(confidences, drafted, accepted, requests, least=30)
    held = calibration._held_out(300, requests)
    for part in (~held, held):
        before = errors(confidences[part], drafted[part], accepted[part])
        after = errors(found.apply(confidences[part]), drafted[part], accepted[part])
        assert np.mean(after) <= np.mean(before)
    assert found.ece_after == (errors(found.apply(confidences[held]), drafted[held], accepted[held]))


def test_with_few_drafts_temperatures_stay_1() -> None:
    found = fit(*drafts(100, [3.0, 3.0]))
    assert found.is_identity
    assert found.note == "temperature stays 1 from position 1 on: 100 outcomes are there, 1333 are needed"


def test_positions_that_are_rarely_verified_stay_1() -> None:
    confidences, drafted, accepted = drafts(20_000, [3.0, 3.0, 3.0])
    drafted[500:] = 1
    found = fit(confidences, drafted, np.minimum(accepted, drafted))
    assert found.temperatures[0] == pytest.approx(3.0, rel=0.1) and found.temperatures[1:] == (1.0, 1.0)
    assert found.note.startswith("temperature stays 1 from position 2 on: 500 outcomes")


def test_confidences_that_tell_nothing_are_named() -> None:
    """Half the tokens stand, whatever the head says."""
    rng = np.random.default_rng(0)
    stands = rng.random((20_000, 2)) < 0.5
    confidences = np.where(rng.random((20_000, 2)) < 0.5, 0.001, 0.999)
    found = fit(confidences, np.full(20_000, 2), np.cumprod(stands, axis=1).sum(axis=1))
    assert found.temperatures == pytest.approx((4.0, 4.0))
    assert found.note == "confidences tell little at positions [1, 2], whose temperature is the limit of the search"


def test_whole_requests_are_held_out() -> None:
    requests = np.repeat(np.arange(100, 116), 3)
    held = calibration._held_out(48, requests)
    assert sorted({*requests[held]}) == [103, 107, 111, 115] and not {*requests[held]} & {*requests[~held]}
    few = calibration._held_out(48, np.repeat([1, 2], 24))
    assert few.tolist() == [i % 4 == 3 for i in range(48)]


def test_a_fit_of_no_drafts() -> None:
    found = fit(np.zeros((0, 5)), np.zeros(0, int), np.zeros(0, int))
    assert found.is_identity and "0 outcomes are there" in found.note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafted": [2, 3]}, r"0 <= accepted <= drafted <= 2 must hold"),
        ({"accepted": [2, 2]}, r"0 <= accepted <= drafted <= 2 must hold"),
        ({"accepted": [-1, 0]}, r"0 <= accepted <= drafted <= 2 must hold"),
        ({"confidences": [[0.5, 1.5], [0, 0]]}, r"confidences must lie in 0\.\.1"),
        ({"confidences": [[0.5, np.nan], [0, 0]]}, r"confidences must lie in 0\.\.1"),
        (
            {"confidences": [[0.5, 0.5]]},
            r"confidences \(1, 2\), drafted \(2,\), accepted \(2,\): \[N, S\], \[N\], \[N\]",
        ),
        ({"confidences": [0.5, 0.5]}, r"\[N, S\], \[N\], \[N\]"),
    ],
)
def test_what_no_record_has_is_refused(change: dict[str, list], message: str) -> None:
    given = {"confidences": [[0.5, 0.5], [0.5, 0.5]], "drafted": [2, 1], "accepted": [1, 1], **change}
    with pytest.raises(ValueError, match=message):
        fit(*(np.array(given[name]) for name in ("confidences", "drafted", "accepted")))
