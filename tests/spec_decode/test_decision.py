"""The compiled decision against its Python twin: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_vllm.native import drafts as native
from deepinfer_vllm.spec_decode.decision import Ranked, by_chances, by_survivals, decided

CHANCES = st.sampled_from([0.0, 1e-30, 0.1, 0.3, 0.5, 0.5, 0.8, 0.95, 1.0, 1.5, -1.0, float("nan")])


@pytest.fixture(autouse=True)
def compiled() -> None:
    assert native.library() is not None, "these tests need a C compiler"


def both(make: object, *arguments: object, **more: object) -> list[object]:
    """What `make` says with compiled code and without."""
    found = [make(*arguments, **more)]  # type: ignore[operator]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        return [*found, make(*arguments, **more)]  # type: ignore[operator]


def assert_same(chances: np.ndarray, scheduled: np.ndarray) -> Ranked:
    for make in (by_chances, by_survivals):
        ours, reference = both(make, chances, scheduled)
        for mine, slow in zip(ours, reference, strict=True):  # type: ignore[call-overload]
            assert mine.dtype == slow.dtype == np.float32
            np.testing.assert_array_equal(mine, slow)
    return by_chances(chances, scheduled)


def assert_alike(drafts: Ranked, verify: np.ndarray, expected: np.ndarray | None, sampling: int, least: int) -> None:
    for early in (True, False):
        ours, reference = both(decided, drafts, expected, verify, 0.0123, sampling, early=early, least=least)
        assert ours[0] == reference[0]  # type: ignore[index]
        np.testing.assert_array_equal(ours[1], reference[1])  # type: ignore[index]
        assert ours[1].dtype == reference[1].dtype == np.int64  # type: ignore[index]


@settings(deadline=None)
@given(st.data())
def test_small_batches(data: st.DataObject) -> None:
    """With equal survivals, none at all, numbers that are no chances, and costs that are flat, smooth or have steps."""
    requests, positions = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
    row = st.lists(CHANCES, min_size=positions, max_size=positions)
    said = np.array(data.draw(st.lists(row, min_size=requests, max_size=requests))).reshape(requests, positions)
    scheduled = data.draw(st.lists(st.integers(0, positions), min_size=requests, max_size=requests))
    drafts = assert_same(said, np.array(scheduled, np.int64))
    limit = data.draw(st.integers(0, int(sum(scheduled))))
    rises = st.sampled_from([0.0, 0.0, 1e-12, 0.01, 0.1, 1.0])
    verify = 1.0 + np.cumsum([0.0, *data.draw(st.lists(rises, min_size=limit, max_size=limit))])
    expected = (np.sort(drafts.best)[::-1] + 0.25) / 2 if data.draw(st.booleans()) else None
    assert_alike(drafts, verify, expected, data.draw(st.integers(0, requests)), data.draw(st.integers(0, limit)))


@pytest.mark.parametrize("requests", [1, 7, 60, 256])
@pytest.mark.parametrize("padded", [1, 8, 64])
def test_large_batches(requests: int, padded: int) -> None:
    random = np.random.default_rng(requests + padded)
    for _ in range(30):
        said = random.random((requests, 5)).astype(random.choice([np.float32, np.float64]))  # type: ignore[arg-type]
        scheduled = random.integers(0, 6, requests) if random.random() < 0.3 else np.full(requests, 5)
        drafts = assert_same(said, scheduled)
        sizes = -(-(requests + np.arange(int(scheduled.sum()) + 1)) // padded) * padded
        verify = 0.02 * (1.0 + (sizes / random.uniform(20, 600)) ** random.uniform(0.8, 3)) ** 0.6
        assert_alike(drafts, verify, None, requests, 0)
        assert_alike(drafts, verify, drafts.best.astype(np.float64) * 0.9, requests, min(requests, len(verify) - 1))


def test_arrays_of_any_layout() -> None:
    random = np.random.default_rng(1)
    wide = random.random((9, 20))
    assert_same(wide[:, ::4], np.arange(18)[::2] % 6)
    assert_same(wide.T[:5].T, np.full(9, 3, np.int32))


def test_without_a_compiler_it_is_the_twin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_NATIVE", "0")
    assert native.library.__wrapped__() is None and not caplog.records  # that is what was asked for
    monkeypatch.setenv("DEEPINFER_VLLM_NATIVE", "1")
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    assert native.library.__wrapped__() is None
