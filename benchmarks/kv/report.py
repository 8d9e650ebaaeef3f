"""The rates and the limits on their ratios, as JSON and as a table that says which are met."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from facts import keep

from kv.plot import svg

NAMES = {
    "fs": "vLLM's fs tier",
    "fs_aged": "the fs tier, aged",
    "raw": "the raw file",
    "raw_all": "the raw file, all threads",
}


@dataclass(frozen=True)
class Limit:
    """A lower bound on the store's rate in a contest, in multiples of another's rate."""

    contest: str
    over: str
    must: float
    aim: float | None = None

    def verdict(self, ratio: float) -> str:
        """What is met."""
        if ratio < self.must:
            return "not met"
        if self.aim is None:
            return "met"
        return "met, aim too" if ratio >= self.aim else "met, aim missed"


LIMITS = (
    *(Limit("store", fs, 2.0) for fs in ("fs", "fs_aged")),
    Limit("load", "fs", 1.3, 1.5),
    *(Limit("load", raw, 0.9) for raw in ("raw", "raw_all")),
    *(Limit("load, cold", raw, 0.9) for raw in ("raw", "raw_all")),
    *(Limit("load, page cache", raw, 0.8) for raw in ("raw", "raw_all")),
)


def ratios(times: Iterable[dict[str, dict[str, float]]], over: str, by: str = "clock") -> list[float]:
    """The store's rate over the other's, of every round."""
    return [turn[over][by] / turn["store"][by] for turn in times]


def judge(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every limit on every shape: median ratio over the rounds, its quartiles, and the verdict."""
    rows = []
    for shape in shapes:
        for limit in LIMITS:
            found = sorted(ratios(shape["times"][limit.contest], limit.over))
            rows.append(
                {
                    "payload_bytes": shape["payload_bytes"],
                    "requests": shape["requests"],
                    "contest": limit.contest,
                    "over": limit.over,
                    "ratio": median(found),
                    "quartiles": [found[len(found) // 4], found[-1 - len(found) // 4]],
                    "must": limit.must,
                    "aim": limit.aim,
                    "verdict": limit.verdict(median(found)),
                }
            )
    return rows


def write(results: dict[str, Any], directory: Path, name: str) -> Path:
    """`name`.json, `name`.svg and `name`.md in `directory`; the path of the last."""
    results["limits"] = judge(results["shapes"])
    page = keep(results, directory, name, table(results) + f"\n![the rates by default]({name}.svg)\n")
    page.with_suffix(".svg").write_text(svg(results))
    return page


def table(results: dict[str, Any]) -> str:
    """A page in Markdown."""
    machine = results["machine"]
    lines = [
        "# Stores and loads beside vLLM's file tier and a plain file",
        "",
        f"`{results['command']}` at commit {results['commit']} on {results['date']}: {machine['cpu']}, "
        f"{machine['cores']} cores, vLLM {machine['vllm']}. Raw numbers are in the JSON file of the same name.",
        "",
        "All in one directory, in turns, round by round; a ratio is the median over the rounds of the rates of one "
        f"round, in brackets its quartiles over {results['rounds']} rounds. Requests are in flight together, "
        f"{results['shapes'][0]['blocks']} blocks each. `store` and `load` go around the page cache (O_DIRECT), which "
        "is everyone's default; `cold` and `page cache` are buffered, read after the pages were dropped and while they "
        "are there. The raw file has no names and no checks, and 4 MiB a call: by one thread a request, as the file "
        f"tier has, and by all {results['threads']}, as the store has. Every session begins with new directories, in "
        "which the file tier makes two more for nearly each block, as it does until a million are there; `aged`, these "
        "are there before it stores.",
        "",
        "| block bytes | requests | what | store, GB/s | fs tier | aged | raw file | all threads |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for shape in results["shapes"]:
        for contest, times in shape["times"].items():
            rates = [_rate(shape, times, who) for who in ("store", *NAMES)]
            lines.append(f"| {shape['payload_bytes']:,} | {shape['requests']} | {contest} | {' | '.join(rates)} |")
    lines += [
        "",
        "| block bytes | requests | limit | measured | must | aim | |",
        "| ---: " * 2 + "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in judge(results["shapes"]):
        aim = "" if row["aim"] is None else f"{row['aim']:g}×"
        low, high = row["quartiles"]
        lines.append(
            f"| {row['payload_bytes']:,} | {row['requests']} | {row['contest']}, over {NAMES[row['over']]} "
            f"| {row['ratio']:.2f}× ({low:.2f} to {high:.2f}) | {row['must']:g}× | {aim} | {row['verdict']} |"
        )
    return "\n".join(lines) + "\n"


def _rate(shape: dict[str, Any], times: list[dict[str, dict[str, float]]], who: str) -> str:
    if who not in times[0]:
        return ""
    payload = shape["payload_bytes"] * shape["requests"] * shape["blocks"]
    return f"{payload / 1e9 / median(turn[who]['clock'] for turn in times):.2f}"
