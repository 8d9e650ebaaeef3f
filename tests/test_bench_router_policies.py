"""What `make bench-router` simulates, and what it calls met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from fleets.report import Target, targets, write  # noqa: E402
from fleets.scenes import LOADS, decode_scenes, prefill_scenes, run_all  # noqa: E402

from deepinfer_simulator.decode_case import DecodeCase  # noqa: E402
from deepinfer_simulator.prefill_case import PrefillCase  # noqa: E402


@pytest.mark.parametrize(
    ("value", "must", "at_least", "aim", "noise", "verdict"),
    [
        (0.93, 0.92, True, 0.94, 0.0, "met, aim missed"),
        (0.94, 0.92, True, 0.94, 0.0, "met, aim too"),
        (0.91, 0.92, True, 0.94, 0.0, "not met"),
        (2.5, 2.5, False, None, 0.0, "met"),
        (2.51, 2.5, False, None, 0.0, "not met"),
        (1.01, 1.0, False, None, 0.01, "met"),
        (1.02, 1.0, False, None, 0.01, "not met"),
    ],
)
def test_verdicts(value: float, must: float, at_least: bool, aim: float | None, noise: float, verdict: str) -> None:
    assert Target("it", value, must, at_least, aim, noise).verdict == verdict


def decode_run(eta: float) -> dict[str, Any]:
    return {"eta": eta, "requests_spread": 0.1, "kv_spread": 0.05}


def prefill_run(mean_s: float, drift: float = 1.0, short_s: float = 0.5, moves: float = 1.0) -> dict[str, Any]:
    groups = [{"prompts": 1, "p50_s": short_s / 2, "p99_s": short_s * (g + 1)} for g in range(4)]
    return {"mean_s": mean_s, "groups": groups, "drift": drift, "efficiency": 0.6, "moves_per_minute": moves}


def runs() -> tuple[dict[str, Any], dict[str, Any]]:
    """Pools stable up to 0.65, a mixed pool up to 0.55; two seeds."""
    decode = {name: [decode_run(0.93), decode_run(0.95)] for name in decode_scenes(30)}
    prefill = {name: [prefill_run(2.0), prefill_run(2.2)] for name in prefill_scenes(120)}
    for name in ("mixed", "pools"):
        for load in LOADS[name]:
            drift = 1.2 if load <= (0.55 if name == "mixed" else 0.65) else 1.8
            prefill[f"fixed {load:g}, {name}"] = [prefill_run(2.0, drift), prefill_run(3.2, drift, moves=2.5)]
    prefill["independent 0.8, least-work"] = [prefill_run(2.0), prefill_run(2.0)]
    return decode, prefill


def test_targets_are_read_off_the_scenes() -> None:
    found = {target.name: (target.value, target.verdict) for target in targets(*runs())}
    assert found["decode balance, one router, views 0.2 s old"] == (pytest.approx(0.94), "met")
    assert found["decode balance, 8 replicas, views 0.2 s old"] == (pytest.approx(0.94), "met, aim too")
    stable = found["fixed chunks: highest stable load over a mixed pool's"]
    assert stable == (pytest.approx(0.65 / 0.55), "met, aim missed")
    assert found["fixed chunks 0.65, no overflow: <16K p99, s"] == (0.5, "met")
    assert found["fixed chunks 0.65, overflow: mean, s"] == (pytest.approx(2.6), "not met")
    assert found["budget chunks 0.75: mean over a mixed pool's"] == (1.0, "met")
    assert found["16 engines, stationary: moves a minute, the most of any run"] == (2.5, "not met")
    assert found["independent engines, pools off: mean over least work left"] == (pytest.approx(1.05), "met")


def test_the_page_and_its_bars(tmp_path: Path) -> None:
    decode, prefill = runs()
    machine = {"cpu": "a CPU", "python": "3"}
    facts = {"command": "make", "commit": "abc", "date": "today", "machine": machine, "seeds": 2}
    text = write({**facts, "decode": decode, "prefill": prefill}, tmp_path).read_text()
    assert "| fixed chunks 0.65, overflow: mean, s | 2.600 | ≤ 2.5 |  | not met |" in text
    assert "| router x8, 0.2 s | 0.940 [0.930..0.950] | 10 % | 5 % |" in text
    assert (
        "| fixed 0.7, pools | 2.60 [2.00..3.20] | 0.25 / 0.50 | 1.00 | 1.50 | 2.00 | 0.600 | 1.80, not stable | 1.8 |"
        in text
    )
    assert "pools take the p99 of <16K from 0.5 to 0.5 s, and longer groups pay: 16K–64K 1.0 to 1.0 s" in text
    assert "with `pools: off`, which is least work left: pools lose there" in text
    bars = [node for node in ElementTree.parse(tmp_path / "router-policies.svg").iter() if node.tag.endswith("rect")]
    assert len(bars) == len(decode)


def test_scenes_run_and_say_how_far_they_are() -> None:
    said: list[str] = []
    scenes = {
        "decode": DecodeCase("round-robin", ranks=4, steps=30),
        "prefill": PrefillCase("context-length-aware", engines=4, ranks=1, load=0.1, seconds=60),
    }
    found = run_all(scenes, 2, 1, said.append)
    assert said == ["2 of 4 runs: decode", "4 of 4 runs: prefill"]
    assert all(0 < run["eta"] <= 1 for run in found["decode"]) and all(
        run["stable"] in (True, False) for run in found["prefill"]
    )
    assert found["prefill"][0] != found["prefill"][1]
