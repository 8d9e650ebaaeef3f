"""What `make bench-dspark` makes of what engines did, and what it calls met."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from drafting.report import write  # noqa: E402
from drafting.rounds import Prompt, Tally, lengths, summary, take_turns  # noqa: E402


class Scripted:
    """An engine that takes the same time for each batch."""

    def __init__(self, seconds: float, counts: dict[str, int], first: int = 7) -> None:
        self.seconds, self.counts, self.first = seconds, counts, first
        self.asked: list[int] = []

    def ask(self, line: str) -> str:
        asked = json.loads(line)
        self.asked.append(len(asked["prompts"]))
        answers = [[self.first] * asked["tokens"] for _ in asked["prompts"]]
        took = {"clock": self.seconds, "processor": self.seconds / 2}
        return json.dumps({**took, "answers": answers, "counts": self.counts})


COUNTS = {
    "verifications": 20,
    "draft_steps": 15,
    "withheld_steps": 5,
    **{f"verified_tokens/{position}": count for position, count in enumerate((20, 10, 4, 0, 0))},
    **{f"accepted_tokens/{position}": count for position, count in enumerate((16, 5, 1, 0, 0))},
}
PROMPTS = [Prompt("code", [1]), Prompt("prose", [2]), Prompt("code", [3])]


def run(batch: int = 1) -> tuple[dict[str, Any], dict[str, Tally]]:
    engines: dict[str, Any] = {
        "none": Scripted(3.0, {}),
        "fixed": Scripted(1.0, COUNTS, first=8),
        "auto": Scripted(1.5, COUNTS),
    }
    said: list[str] = []
    tallies = take_turns(engines, PROMPTS, batch, 4, 2, said.append)
    assert len(said) == 3 and said[0].endswith("warms up")
    return engines, tallies


def test_every_engine_answers_every_prompt_in_every_round() -> None:
    engines, tallies = run()
    assert all(engine.asked == [1] * 9 for engine in engines.values())
    assert tallies["auto"].seconds == {"clock": [4.5, 4.5], "processor": [2.25, 2.25]}
    assert tallies["auto"].counts["verifications"] == 2 * 3 * 20  # not those of the round that warms up
    assert tallies["auto"].by_workload["code"]["verifications"] == 2 * 2 * 20
    assert tallies["fixed"].same_answers == [False] * 6 and tallies["auto"].same_answers == [True] * 6
    engines, tallies = run(batch=2)
    assert engines["none"].asked == [3] * 3 and tallies["auto"].by_workload == {}


def test_lengths_are_read_off_the_counters() -> None:
    found = lengths(Counter(COUNTS))
    assert found["accepted_length"] == 1 + 22 / 20 and found["verified_length"] == 34 / 20
    assert found["accepted_by_position"] == [0.8, 0.5, 0.25, None, None]
    assert found["verified_by_position"] == [1.0, 0.5, 0.2, 0.0, 0.0]
    assert found["withheld_steps"] == 0.25
    assert lengths(Counter())["accepted_length"] == 1.0


@pytest.mark.parametrize(("batch", "verdict"), [(1, "met"), (2, None)])
def test_the_page(tmp_path: Path, batch: int, verdict: str | None) -> None:
    rows = summary(run(batch)[1], batch, 12)
    machine = {"cpu": "a CPU", "vllm": "0.32"}
    facts = {"command": "make", "commit": "abc", "date": "today", "machine": machine, "checkpoint": "the pair"}
    page = write({**facts, "rounds": 2, "tokens": 4, "results": rows}, tmp_path)
    text, results = page.read_text(), json.loads((tmp_path / "dspark.json").read_text())
    assert [limit["verdict"] for limit in results["limits"]] == [verdict] * bool(verdict)
    ratio = "2.00 | 2.00"
    assert f"| {batch} | budget | {'3' if batch == 1 else '8'} | {ratio} | 2.10 | 1.70 | 25% | 100.0% |" in text
    assert f"| {batch} | 5 drafts | 0.80 (1.00) | 0.50 (0.50) | 0.25 (0.20) |  |  |" in text
    assert ("| code | 2.10 | 2.10 |" in text) == (batch == 1)
    assert len(list(ElementTree.parse(tmp_path / "dspark.svg").iter("{http://www.w3.org/2000/svg}rect"))) == 3
