"""What steps report of drafting, and what Prometheus says after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from deepinfer_vllm.report_metrics import ReportMetrics
from deepinfer_vllm.spec_decode import metrics
from deepinfer_vllm.spec_decode.stats import RECENT, DraftStats

POSITIONS = 5


def step(stats: DraftStats, verified: list[int], accepted: list[int]) -> None:
    stats.verified(np.array(verified), np.array(accepted))


def test_a_quiet_worker_reports_nothing() -> None:
    stats = DraftStats(POSITIONS)
    stats.gauges["calibrated"] = 1.0
    step(stats, [], [])
    assert stats.take() == {}


def test_a_step_reports_once_in_plain_values() -> None:
    stats = DraftStats(POSITIONS)
    stats.drafted(3)
    stats.masked(2, 0)
    stats.masked(0, 0)
    step(stats, [5, 2, 0], [3, 2, 0])
    stats.timed(0.25, 0.5)
    report = stats.take()
    assert report == {
        "counters": {
            "draft_steps": 1,
            "drafted_tokens": 15,
            "masked_tokens": 2,
            "unmasked_requests": 0,
            "verifications": 3,
            "verified_tokens": [2, 2, 1, 1, 1],
            "accepted_tokens": [2, 2, 1, 0, 0],
        },
        "gauges": {"drafting": 1.0, "accepted_length": 8 / 3},
        "histograms": {"budget_tokens": [7], "predicted_step_seconds": [0.25], "measured_step_seconds": [0.5]},
    }
    assert {type(v) for v in report["counters"]["verified_tokens"]} == {int}
    assert stats.take() == {}


def test_steps_between_two_reports_add_up() -> None:
    stats = DraftStats(POSITIONS)
    generator = np.random.default_rng(0)
    verified = generator.integers(0, POSITIONS + 1, (20, 7))
    accepted = (verified * generator.random((20, 7))).astype(np.int64)
    for row, stood in zip(verified, accepted, strict=True):
        stats.verified(row, stood)
    counters = stats.take()["counters"]
    for name, ends in (("verified_tokens", verified), ("accepted_tokens", accepted)):
        assert counters[name] == [int((ends > position).sum()) for position in range(POSITIONS)]
    assert counters["verifications"] == 140


def test_no_drafts_at_all_are_a_length_of_one() -> None:
    stats = DraftStats(POSITIONS)
    stats.withheld()
    step(stats, [0, 0], [0, 0])
    report = stats.take()
    assert report["counters"] == {"withheld_steps": 1, "verifications": 2}
    assert report["gauges"] == {"drafting": 0.0, "accepted_length": 1.0}


def test_the_accepted_length_forgets() -> None:
    stats = DraftStats(POSITIONS)
    step(stats, [5] * RECENT, [5] * RECENT)
    step(stats, [5] * (RECENT // 2), [0] * (RECENT // 2))
    assert stats.gauges["accepted_length"] == (3 * RECENT + RECENT // 2) / RECENT
    step(stats, [5] * 2 * RECENT, [1] * 2 * RECENT)  # more requests than are remembered
    assert stats.gauges["accepted_length"] == 2.0


def forget() -> None:
    for collector in [c for c in REGISTRY._collector_to_names if getattr(c, "_name", "").startswith(metrics.PREFIX)]:
        REGISTRY.unregister(collector)


@pytest.fixture
def published() -> Iterator[ReportMetrics]:
    forget()
    yield ReportMetrics(metrics.DEFINITIONS, "tiny", [0, 1])
    forget()


def value(name: str, engine: int, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(metrics.PREFIX + name, {"model_name": "tiny", "engine": str(engine), **labels})


def test_metrics_add_reports_up_by_engine(published: ReportMetrics) -> None:
    stats = DraftStats(POSITIONS)
    for _ in range(2):
        stats.drafted(2)
        step(stats, [5, 5], [1, 4])
        stats.timed(0.25, 0.5)
        published.observe(stats.take(), 1)
    assert value("verifications_total", 1) == 4.0 and value("verifications_total", 0) == 0.0
    assert [value("accepted_tokens_total", 1, position=str(p)) for p in range(POSITIONS)] == [4, 2, 2, 2, 0]
    assert value("accepted_length", 1) == 3.5 and value("accepted_length", 0) is None
    assert value("budget_tokens_sum", 1) == 20.0 and value("budget_tokens_count", 1) == 2.0
    assert value("measured_step_seconds_sum", 1) == 1.0


def test_every_name_a_worker_reports_is_a_metric() -> None:
    stats = DraftStats(POSITIONS)
    stats.drafted(1)
    stats.masked(1, 2)
    stats.withheld()
    step(stats, [1], [1])
    stats.timed(1.0, 1.0)
    report: dict[str, Any] = stats.take()
    assert report["counters"].keys() == metrics.COUNTERS.keys() | metrics.POSITION_COUNTERS.keys()
    assert report["gauges"].keys() <= metrics.GAUGES.keys()
    assert report["histograms"].keys() == metrics.HISTOGRAMS.keys()


def test_the_manual_has_the_table(root: Path) -> None:
    assert metrics.DEFINITIONS.markdown_table() in (root / "docs" / "serving.md").read_text()
