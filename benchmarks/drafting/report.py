"""The page of `benchmarks/dspark.py`: what was asked for, what was found, and the bars."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from facts import keep

from deepinfer_simulator.bars import svg
from drafting.engine import MODES

MUSTS = {1: 1.5, 4: 1.0, 16: 1.0}
"""Of a batch size: at least so much of the speed without drafts must the budget have."""


def limits(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be met, of what was measured."""
    found = {row["batch"]: row["ratio"]["clock"] for row in rows if row["mode"] == "auto"}
    return [
        {"batch": batch, "value": found[batch], "must": must, "verdict": "met" if found[batch] >= must else "missed"}
        for batch, must in MUSTS.items()
        if batch in found
    ]


def write(results: dict[str, Any], directory: Path, name: str = "dspark") -> Path:
    """`name`.json, `name`.svg and `name`.md; the path of the last. Adds the limits to the results."""
    rows = results["results"]
    results["limits"] = limits(rows)
    bars = [(f"batch {row['batch']}, {MODES[row['mode']]}", row["ratio"]["clock"]) for row in rows]
    page = keep(results, directory, name, text(results) + f"\n![speed beside no drafts]({name}.svg)\n")
    page.with_suffix(".svg").write_text(svg("speed beside the same engine without drafts", bars))
    return page


def text(results: dict[str, Any]) -> str:
    """The page without its picture."""
    machine = results["machine"]
    rows = results["results"]
    drafting = [row for row in rows if row["mode"] != "none"]
    single = [row for row in drafting if row["workloads"]]
    return "\n".join(
        [
            "# DSpark on a CPU",
            "",
            f"`{results['command']}`, commit {results['commit']}, {results['date']}; {machine['cpu']}, one thread; "
            f"vLLM {machine['vllm']}, float32, {results['checkpoint']}. Medians of {results['rounds']} rounds in which "
            f"the engines take turns on the same prompts, {results['tokens']} tokens an answer, greedy. A batch is "
            "so many requests at any time: when one ends, the next begins.",
            "",
            "| batch | must | speed of the budget beside no drafts | |",
            "| --- | --- | --- | --- |",
            *(f"| {x['batch']} | ≥ {x['must']} | {x['value']:.2f} | {x['verdict']} |" for x in results["limits"]),
            "",
            "## Speed",
            "",
            "Accepted: tokens a request gets in a step, the sampled one with them. Verified: drafts that a request has "
            "checked in a step. Withheld: steps that drafted nothing. Same: answers equal to those without drafts; in "
            "float32 a near tie may fall otherwise where matrices of other shapes are multiplied.",
            "",
            "| batch | drafts | tokens/s | beside none | by processor time | accepted | verified | withheld | same |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *(_speed(row) for row in rows),
            "",
            "## Accepted by position",
            "",
            "Of the drafts verified at a position, how many stood; in brackets, how many requests had one there.",
            "",
            "| batch | drafts | 1 | 2 | 3 | 4 | 5 |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(_positions(row) for row in drafting),
            "",
            "## Accepted length by kind of text, one request at a time",
            "",
            "| text | " + " | ".join(MODES[row["mode"]] for row in single) + " |",
            "| --- |" + " --- |" * len(single),
            *(
                f"| {name} | " + " | ".join(f"{row['workloads'][name]['accepted_length']:.2f}" for row in single) + " |"
                for name in (single[0]["workloads"] if single else ())
            ),
            "",
        ]
    )


def _speed(row: dict[str, Any]) -> str:
    rate = statistics.median(row["tokens_per_second"]["clock"])
    cells = [str(row["batch"]), MODES[row["mode"]], f"{rate:.0f}"]
    if row["mode"] == "none":
        return f"| {' | '.join(cells)} | | | | | | |"
    ratios = [f"{row['ratio'][by]:.2f}" for by in ("clock", "processor")]
    drafts = [f"{row['accepted_length']:.2f}", f"{row['verified_length']:.2f}", f"{row['withheld_steps']:.0%}"]
    drafts.append(f"{row['same_answers']:.1%}")
    return f"| {' | '.join(cells + ratios + drafts)} |"


def _positions(row: dict[str, Any]) -> str:
    cells = [
        "" if share is None else f"{share:.2f} ({there:.2f})"
        for share, there in zip(row["accepted_by_position"], row["verified_by_position"], strict=True)
    ]
    return f"| {row['batch']} | {MODES[row['mode']]} | {' | '.join(cells)} |"
