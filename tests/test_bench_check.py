"""What `benchmarks/kvstore_check.py` asks of a daemon, and what it calls met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import kvstore_check  # noqa: E402
from kv import checks  # noqa: E402


def test_a_stored_prompt_is_asked_for_and_found(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    prompt = checks.prompt(checks.TURN_TOKENS + 200)
    store = checks.Store(tmp_path / "root", 64, [prompt], 2000)
    with checks.daemon(tmp_path / "root", tmp_path, 2000) as (socket, process):
        times = checks.check_times(socket, store, prompt, 2)
        assert {way: len(found) for way, found in times.items()} == {"python": 2, "compiled": 2, "turn": 2}
        assert 10e6 < checks.anonymous_bytes(process) < 100e6
        assert len(checks.lookup_times(tmp_path / "index", store, 3)) == 3
        with pytest.raises(RuntimeError, match="found fewer"):
            checks.check_times(socket, store, checks.prompt(checks.TURN_TOKENS + 200, seed=1), 1)


def results(check_ms: float, lookup_ms: float) -> dict[str, Any]:
    times = {"python": [check_ms], "compiled": [check_ms], "turn": [check_ms]}
    return {
        "keys": 1,
        "check": [
            {"tokens": tokens, "block": block, "ms": times} for tokens in (16_384, 131_072) for block in (64, 128)
        ],
        "hashing": [{"tokens": 16_384, "block": 64, "ms": {"vllm": [3.0], "python": [2.0], "compiled": [0.5]}}],
        "lookup_ms": [lookup_ms],
        "anonymous_mb": 30.0,
    }


def test_limits_are_those_of_medians() -> None:
    found = kvstore_check.judge(results(2.5, 9.0))
    assert [limit["verdict"] for limit in found] == ["met"] * 5 + ["not met"] * 2 + ["met"]
    assert [limit["at_most"] for limit in found] == [3, 3, 17, 3, 13, 2, 3, 100]


def test_the_page_has_ratios_and_verdicts() -> None:
    taken = results(1.0, 1.0)
    taken["limits"] = kvstore_check.judge(taken)
    page = kvstore_check.table(taken)
    assert "| 16,384, 64 | 3.00 | 2.00 | 0.50 | 1.50 | 6.0 |" in page and page.count("| met |") == 8
