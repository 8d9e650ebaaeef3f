"""What `make bench-chunking` makes of what engines did, and what it calls met."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from chunks.load import CYCLE, LONG, SHORT, prompt_lengths  # noqa: E402
from chunks.report import limits, row, tight_limits, write  # noqa: E402


def measured(wait_s: float, seconds: float, errors: list[float] | None = None, slow_s: float | None = None) -> Any:
    """1000 waits, of which 20 are slow."""
    intervals = [wait_s] * 980 + [wait_s if slow_s is None else slow_s] * 20
    return {
        "intervals": intervals,
        "seconds": seconds,
        "prompt_tokens": 10_000,
        "errors": errors or [],
        "answers": [[1, 2], [3, 4]],
    }


def rows(ours: Any, **fixed: Any) -> list[dict[str, Any]]:
    return [row("cost", "ours", ours), *(row(name, "stock", each) for name, each in fixed.items())]


def test_the_load_is_the_same_for_all() -> None:
    lengths = prompt_lengths(2, seed=1)
    assert lengths == prompt_lengths(2, seed=1) and len(lengths) == 2 * CYCLE
    assert lengths.count(LONG) == 2 and min(lengths) >= SHORT[0]


def test_a_row_has_quantiles_of_all_waits() -> None:
    found = row("cost", "ours", measured(0.05, 20.0, [0.3, 0.1, 0.2], slow_s=0.4))
    assert (found["p50_s"], found["p90_s"], found["p99_s"]) == (0.05, 0.05, 0.4)
    assert (found["prefill_tokens_per_second"], found["error"], found["errors"]) == (500.0, 0.2, 3)


@pytest.mark.parametrize(
    ("ours", "fixed", "verdicts"),
    [
        # One size keeps to the target and loses a fifth; another does not and is no rival.
        (measured(0.1, 80, [0.05]), {"a": measured(0.1, 100), "b": measured(0.2, 50)}, ["met", "met", "met"]),
        (measured(0.1, 80, [0.05]), {"a": measured(0.114, 85)}, ["met", "missed", "met"]),
        (measured(0.1, 80, [0.05]), {"a": measured(0.2, 50)}, ["met", "met", "met"]),
        (measured(0.12, 80, [0.05]), {"a": measured(0.1, 100)}, ["missed", "met", "met"]),
        (measured(0.08, 80, [0.05]), {"a": measured(0.1, 100)}, ["missed", "met", "met"]),
        (measured(0.1, 80, [0.2]), {"a": measured(0.1, 100)}, ["met", "met", "missed"]),
        (measured(0.1, 80), {"a": measured(0.1, 100)}, ["met", "met", "missed"]),  # too few steps to tell
    ],
)
def test_limits(ours: Any, fixed: dict[str, Any], verdicts: list[str]) -> None:
    assert [x["verdict"] for x in limits(rows(ours, **fixed), target_s=0.1)] == verdicts


@pytest.mark.parametrize(
    ("ours", "fixed", "verdicts"),
    [
        (measured(0.12, 300), {"a": measured(0.12, 250), "b": measured(0.3, 100)}, ["met", "met"]),
        (measured(0.12, 300), {"a": measured(0.1, 250), "b": measured(0.3, 100)}, ["met", "missed"]),
        (measured(0.12, 300), {"a": measured(0.05, 350), "b": measured(0.3, 100)}, ["met", "met"]),  # a is slower
        (measured(0.12, 500), {"b": measured(0.3, 100)}, ["missed", "met"]),
        (measured(0.12, 80), {"b": measured(0.3, 100)}, ["met", "met"]),
    ],
)
def test_limits_of_a_target_that_cannot_be_kept(ours: Any, fixed: dict[str, Any], verdicts: list[str]) -> None:
    assert [x["verdict"] for x in tight_limits(rows(ours, **fixed), share=0.25)] == verdicts


def test_the_page_and_its_picture(tmp_path: Path) -> None:
    results: dict[str, Any] = {
        "command": "make bench-chunking",
        "commit": "abc",
        "date": "2026-11-30",
        "machine": {"cpu": "a CPU", "vllm": "0.32.0"},
        "target_s": 0.1,
        "streams": 12,
        "clock": "wall",
        "times": 2.2,
        "cycles": 1,
        "least_share": None,
        "results": rows(measured(0.1, 80, [0.05]), **{"36 tokens": measured(0.1, 100)}),
    }
    results["results"][0]["answers"] = [[1, 2], [3, 5]]
    page = write(results, tmp_path, "chunking").read_text()
    assert "| cost | 100 | 100 | 100 | 1.00 | 125 | 1.00 | 50% |" in page
    assert "| 36 tokens | 100 | 100 | 100 | 1.00 | 100 | 0.80 | 100% |" in page
    assert page.count("| met |") == 3
    kept = json.loads((tmp_path / "chunking.json").read_text())
    assert [each["same"] for each in kept["results"]] == [0.5, 1.0] and "answers" not in kept["results"][0]
    picture = ElementTree.parse(tmp_path / "chunking.svg")
    assert len(picture.findall("{http://www.w3.org/2000/svg}circle")) == 2
