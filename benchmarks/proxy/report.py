"""Limits on what was measured, and a page that says which are met and where others are better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from facts import keep

from proxy.rounds import CACHE_AWARE, DIRECT, OURS, OURS_ALL, OURS_PD, ROUND_ROBIN, VLLM_PD

Rounds = Sequence[dict[str, dict[str, Any]]]
P50, P99 = 0, 2
"""Places in router_load's percentiles."""


@dataclass(frozen=True)
class Ratio:
    """An upper bound on ours over another's, in one round."""

    name: str
    contest: str
    over: str
    most: float
    aim: float | None = None
    what: str = "cpu_us"
    ours: str = OURS


RATIOS = (
    Ratio("CPU of a request", "request", ROUND_ROBIN, 1.05, 0.9),
    Ratio("CPU of a request", "request", CACHE_AWARE, 0.6),
    Ratio("CPU of a token, 50,000 a second", "50,000 tokens/s", ROUND_ROBIN, 1.1, 1.0),
    Ratio("CPU of a token, 20,000 a second", "20,000 tokens/s", ROUND_ROBIN, 1.1, 1.0),
    Ratio("CPU of a token, flooded", "flood", ROUND_ROBIN, 0.6),
    Ratio("CPU of a request of 4 KB, prefill and decode apart", "request of 4 KB", VLLM_PD, 0.95, ours=OURS_PD),
    Ratio("CPU of both hops over one of theirs", "request of 4 KB", ROUND_ROBIN, 1.9, ours=OURS_PD),
    Ratio("memory, 400 streams", "50,000 tokens/s", ROUND_ROBIN, 0.5, what="rss_mb"),
    Ratio("memory, 1000 streams", "50,000 tokens/s, 1000 streams", ROUND_ROBIN, 0.5, what="rss_mb"),
    Ratio("latency on one connection, p50", "one connection", ROUND_ROBIN, 1.25, what="time_us"),
)


def per_round(rounds: Rounds, contest: str, of: Callable[[dict[str, Any]], float | None]) -> list[float]:
    """`of` each round's results of a contest, by proxy; those that are None are left out."""
    return [value for found in rounds if contest in found and (value := of(found[contest])) is not None]


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Every limit: median and extremes over the rounds, what is allowed, the verdict."""
    rounds: Rounds = results["rounds"]
    rows = []
    for limit in RATIOS:
        found = per_round(rounds, limit.contest, lambda by, limit=limit: _ratio(by, limit))
        rows.append(_row(f"{limit.name}: {limit.ours} / {limit.over}", found, limit.most, limit.aim))
    for name, place, most in (("p50", P50, None), ("p99", P99, 1000.0)):
        found = per_round(rounds, "idle", lambda by, place=place: _added(by, place))
        rows.append(_row(f"added to an idle engine's {name}: µs", found, most))
    memory = per_round(rounds, "50,000 tokens/s, 1000 streams", lambda by: by[OURS]["rss_mb"] if OURS in by else None)
    rows.append(_row("memory, 1000 streams: MB", memory, 60.0))
    rows += [_row(name, found, most) for name, found, most in results.get("absolute", ())]
    return rows


def _ratio(by: dict[str, Any], limit: Ratio) -> float | None:
    if limit.ours not in by or limit.over not in by:
        return None
    ours, other = (_number(by[name][limit.what]) for name in (limit.ours, limit.over))
    return ours / other if other else None


def _number(value: Any) -> float:
    return float(value[P50] if isinstance(value, list) else value)


def _added(by: dict[str, Any], place: int) -> float | None:
    if OURS not in by or DIRECT not in by:
        return None
    return float(by[OURS]["time_us"][place] - by[DIRECT]["time_us"][place])


def _row(name: str, found: Iterable[float], most: float | None, aim: float | None = None) -> dict[str, Any]:
    values = sorted(found)
    if not values:
        return {"name": name, "found": None, "most": most, "aim": aim, "verdict": "absent"}
    middle = median(values)
    verdict = "" if most is None else "not met" if middle > most else "met"
    if verdict == "met" and aim is not None:
        verdict = "met, aim too" if middle <= aim else "met, aim missed"
    extremes = [values[0], values[-1]]
    return {"name": name, "found": middle, "extremes": extremes, "most": most, "aim": aim, "verdict": verdict}


def write(results: dict[str, Any], directory: Path) -> Path:
    """router.json and router.md; the path of the page."""
    results["limits"] = judge(results)
    return keep(results, directory, "router", table(results))


def table(results: dict[str, Any]) -> str:
    """A page in Markdown."""
    machine, rounds = results["machine"], results["rounds"]
    lines = [
        "# The router beside vllm-router and HAProxy",
        "",
        f"`{results['command']}` at commit {results['commit']} on {results['date']}: {machine['cpu']}, "
        f"{machine['cores']} cores; our router under Python {results['router_python']}. Raw numbers are in the JSON "
        "file of the same name.",
        "",
        "Each proxy has one core, engines and clients in C have another. CPU is user and system time of all its "
        f"processes. A ratio is of two measurements of one round; medians over {len(rounds)} rounds, in brackets the "
        "extremes. Ours runs with its full policy, counters, histograms and deadlines, bodies passed to the engine as "
        "they come, CHECK off; where it says so, with conversations encoded by deepseek-recipe and CHECK on.",
        "",
        "| limit | found | must | aim | |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in results["limits"]:
        most, aim = ("" if row[name] is None else f"{row[name]:g}" for name in ("most", "aim"))
        found = (
            "" if row["found"] is None else f"{row['found']:.2f} [{row['extremes'][0]:.2f}–{row['extremes'][1]:.2f}]"
        )
        lines.append(f"| {row['name']} | {found} | {most} | {aim} | {row['verdict']} |")
    lines += [
        "",
        "| load | proxy | CPU µs | a second | p50 ms | p99 ms | memory MB | failed |",
        "| --- | --- | " + "---: | " * 6,
    ]
    for contest in rounds[0]:
        for name in rounds[0][contest]:
            rows = [found[contest][name] for found in rounds]
            times = "delay_us" if rows[0]["delay_us"][0] >= 0 else "time_us"
            cells = [median(row["cpu_us"] for row in rows), median(row["per_second"] for row in rows)]
            cells += [median(row[times][place] for row in rows) / 1e3 for place in (P50, P99)]
            memory, failed = median(row["rss_mb"] for row in rows), sum(row["failed"] for row in rows)
            numbers = f"{cells[0]:.1f} | {cells[1]:,.0f} | {cells[2]:.2f} | {cells[3]:.2f} | {memory:.0f} | {failed}"
            lines.append(f"| {contest} | {name} | {numbers} |")
    lines += ["", *results.get("notes", ())]
    return "\n".join(lines).rstrip() + "\n"


def losses(rounds: Rounds) -> list[str]:
    """A line for each load in which another proxy takes less than ours: by how much."""
    lines = []
    for contest in rounds[0]:
        for name in rounds[0][contest]:
            ours = OURS_PD if name == VLLM_PD else OURS
            if name in (OURS, OURS_ALL, OURS_PD, DIRECT) or ours not in rounds[0][contest]:
                continue
            for what, unit in (("cpu_us", "CPU"), ("time_us", "latency"), ("rss_mb", "memory")):
                if what == "time_us" and "connection" not in contest and contest != "idle":
                    continue
                limit = Ratio("", contest, name, 1.0, what=what, ours=ours)
                if (found := per_round(rounds, contest, lambda by, limit=limit: _ratio(by, limit))) and median(
                    found
                ) > 1.05:
                    lines.append(f"- {contest}: {name} takes less {unit}; ours {median(found):.2f} times as much.")
    return lines
