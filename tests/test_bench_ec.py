"""What `benchmarks/kvstore_ec.py` measures, and what it calls met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import kvstore_ec  # noqa: E402
from kv import erasure  # noqa: E402

PAYLOAD_BYTES = 5000


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_both_stores_move_every_byte_each_round(tmp_path: Path, direct: str) -> None:
    found = erasure.rates(tmp_path, PAYLOAD_BYTES, requests=2, blocks=3, rounds=2, direct=direct)
    assert {what: {who: len(seconds) for who, seconds in times.items()} for what, times in found.items()} == {
        "store": {"plain": 2, "ec": 2},
        "load": {"plain": 2, "ec": 2},
    }
    assert len(list(tmp_path.glob("root*/*/slabs/*.slab"))) == erasure.ROOTS


def test_the_slow_root_is_late_and_the_bytes_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "TURN", 2)
    found = erasure.latencies(tmp_path, PAYLOAD_BYTES, turns=1, delay_seconds=0.01)
    assert {name: len(seconds) for name, seconds in found.items()} == {"quick": 2, "slowed": 2}


def test_two_roots_are_removed(tmp_path: Path) -> None:
    assert erasure.removed(tmp_path, PAYLOAD_BYTES, blocks=4)
    assert not (tmp_path / "root0").exists() and not (tmp_path / "root7").exists()


def results(plain: float, ec: float, slowed: float, right: bool) -> dict[str, Any]:
    times = {"plain": [plain, plain], "ec": [ec, ec]}
    return {
        "payload_bytes": 10**6,
        "rates": [{"direct": "auto", "requests": 1, "blocks": 1, "seconds": {"store": times, "load": times}}],
        "latency_blocks": 16,
        "latency_seconds": {"quick": [0.001] * 100, "slowed": [slowed] * 100},
        "two_roots_removed_every_byte_right": right,
    }


@pytest.mark.parametrize(
    ("found", "verdicts"),
    [
        (results(0.6, 1.0, 0.0015, True), ["met", "met", "met"]),
        (results(0.59, 1.0, 0.0015, True), ["not met", "met", "met"]),
        (results(0.6, 1.0, 0.0016, True), ["met", "not met", "met"]),
        (results(0.6, 1.0, 0.0015, False), ["met", "met", "not met"]),
    ],
)
def test_verdicts(found: dict[str, Any], verdicts: list[str]) -> None:
    found["limits"] = kvstore_ec.judge(found)
    assert [limit["verdict"] for limit in found["limits"]] == verdicts
    assert kvstore_ec.table(found).count("not met") == verdicts.count("not met")
