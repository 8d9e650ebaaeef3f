"""Rounds in which the engines take turns on the same prompts."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from child import Child

from drafting.engine import DRAFTS


@dataclass(frozen=True)
class Prompt:
    """A prompt and the kind of text that it begins."""

    workload: str
    ids: list[int]


@dataclass
class Tally:
    """What one engine has done at one batch size."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"clock": [], "processor": []})
    """Of each round, by either time."""
    counts: Counter[str] = field(default_factory=Counter)
    by_workload: dict[str, Counter[str]] = field(default_factory=dict)
    same_answers: list[bool] = field(default_factory=list)
    """Of each answer, whether it is that of the engine without drafts."""

    def add(self, found: dict[str, Any], expected: list[list[int]], workload: str | None) -> None:
        """What the engine said of a batch, all of one kind of text or of several."""
        self.counts.update(found["counts"])
        self.same_answers += [own == wanted for own, wanted in zip(found["answers"], expected, strict=True)]
        if workload is not None:
            self.by_workload.setdefault(workload, Counter()).update(found["counts"])


def take_turns(
    engines: dict[str, Child],
    prompts: Sequence[Prompt],
    batch: int,
    tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Tally]:
    """`rounds` rounds after one that warms up; in each, every engine answers all prompts, `batch` at a time.

    One at a time, engines take turns by the prompt, and what they did is told by kind of text.
    """
    tallies = {mode: Tally() for mode in engines}
    groups = [[prompt] for prompt in prompts] if batch == 1 else [prompts]
    order = list(engines)
    for number in range(rounds + 1):
        took = {mode: Counter[str]() for mode in engines}
        for group in groups:
            line = json.dumps({"prompts": [prompt.ids for prompt in group], "tokens": tokens, "batch": batch})
            said = {mode: json.loads(engines[mode].ask(line)) for mode in order}
            order = order[1:] + order[:1]
            for mode, found in said.items():
                took[mode].update({by: found[by] for by in ("clock", "processor")})
                if number:
                    tallies[mode].add(found, said["none"]["answers"], group[0].workload if batch == 1 else None)
        if number:
            for mode, seconds in took.items():
                for by, value in seconds.items():
                    tallies[mode].seconds[by].append(value)
        say(f"batch {batch}: round {number} of {rounds}" + (", which warms up" if not number else ""))
    return tallies


def summary(tallies: dict[str, Tally], batch: int, generated: int) -> list[dict[str, Any]]:
    """A row for each engine at a batch size: its speed, beside that of the engine without drafts, and its drafts."""
    rows = []
    for mode, tally in tallies.items():
        ratios = {
            by: statistics.median(
                without / own for without, own in zip(tallies["none"].seconds[by], seconds, strict=True)
            )
            for by, seconds in tally.seconds.items()
        }
        rows.append(
            {
                "batch": batch,
                "mode": mode,
                "ratio": ratios,
                "tokens_per_second": {by: [generated / s for s in seconds] for by, seconds in tally.seconds.items()},
                "same_answers": sum(tally.same_answers) / len(tally.same_answers),
                **({} if mode == "none" else lengths(tally.counts)),
                "workloads": {} if mode == "none" else {n: lengths(counts) for n, counts in tally.by_workload.items()},
            }
        )
    return rows


def lengths(counts: Counter[str]) -> dict[str, Any]:
    """What counters say of drafts: the mean accepted length, what is verified a token sampled, and both by position."""
    verified = [counts[f"verified_tokens/{position}"] for position in range(DRAFTS)]
    accepted = [counts[f"accepted_tokens/{position}"] for position in range(DRAFTS)]
    verifications = counts["verifications"] or 1
    return {
        "accepted_length": 1 + sum(accepted) / verifications,
        "verified_length": sum(verified) / verifications,
        "withheld_steps": counts["withheld_steps"] / ((counts["withheld_steps"] + counts["draft_steps"]) or 1),
        "accepted_by_position": [a / v if v else None for a, v in zip(accepted, verified, strict=True)],
        "verified_by_position": [v / verifications for v in verified],
    }
