"""The page of `benchmarks/chunking.py`: who keeps to the target, and what it costs in prefill."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from facts import keep

BAND = 0.15
"""Of the target that the 99th percentile may be off."""
LOSS = 0.10
"""Of ours that a fixed size has to lose in prefill, if it keeps to the target."""
ERROR = 0.10


def row(name: str, kind: str, measured: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one contender's load."""
    waits = sorted(measured["intervals"])
    return {
        "name": name,
        "kind": kind,
        "prefill_tokens_per_second": measured["prompt_tokens"] / measured["seconds"],
        "seconds": measured["seconds"],
        "tokens_that_waited": len(waits),
        **{f"p{part}_s": waits[min(len(waits) - 1, len(waits) * part // 100)] for part in (50, 90, 99)},
        "error": median(measured["errors"]) if measured["errors"] else None,
        "errors": len(measured["errors"]),
        "answers": measured["answers"],
    }


def limits(rows: list[dict[str, Any]], target_s: float) -> list[dict[str, Any]]:
    """What must be met, of what was measured."""
    ours = next(each for each in rows if each["kind"] == "ours")
    rate = ours["prefill_tokens_per_second"]
    keeping = [
        x["prefill_tokens_per_second"] for x in rows if x["kind"] == "stock" and x["p99_s"] <= (1 + BAND) * target_s
    ]
    lost = 1 - max(keeping) / rate if keeping else 1.0
    off = ours["p99_s"] / target_s - 1
    found = [
        ("p99 of ours, off the target", off, f"within ±{BAND:.0%}", abs(off) <= BAND),
        ("prefill that the best fixed size loses which keeps to it", lost, f"≥ {LOSS:.0%}", lost >= LOSS),
        ("median error of predicted steps", ours["error"], f"≤ {ERROR:.0%}", (ours["error"] or 1.0) <= ERROR),
    ]
    return [_limit(*each) for each in found]


def tight_limits(rows: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    """What must be met where the target leaves prompts less than their least share."""
    ours = next(each for each in rows if each["kind"] == "ours")
    fixed = [each for each in rows if each["kind"] == "stock"]
    part = ours["prefill_tokens_per_second"] / max(each["prefill_tokens_per_second"] for each in fixed)
    as_fast = [x["p99_s"] for x in fixed if x["prefill_tokens_per_second"] >= ours["prefill_tokens_per_second"]]
    off = ours["p99_s"] / min(as_fast) - 1 if as_fast else 0.0
    found = [
        ("prefill of ours, of the fastest fixed size's", part, f"≥ {share:.0%}", part >= share),
        ("p99 of ours, off the lowest of fixed sizes with as much prefill", off, f"≤ {BAND:+.0%}", off <= BAND),
    ]
    return [_limit(*each) for each in found]


def _limit(name: str, value: float | None, must: str, met: bool) -> dict[str, Any]:
    return {"limit": name, "value": value, "must": must, "verdict": "met" if met else "missed"}


def write(results: dict[str, Any], directory: Path, name: str) -> Path:
    """`name`.json, `name`.svg and `name`.md; the path of the last. Adds the limits to the results, and how many answers
    are those of the first stock scheduler."""
    rows = results["results"]
    reference = next(each["answers"] for each in rows if each["kind"] == "stock")
    for each in rows:
        each["same"] = sum(a == b for a, b in zip(each.pop("answers"), reference, strict=True)) / len(reference)
    share = results["least_share"]
    results["limits"] = limits(rows, results["target_s"]) if share is None else tight_limits(rows, share)
    page = keep(results, directory, name, text(results) + f"\n![p99 and prefill]({name}.svg)\n")
    page.with_suffix(".svg").write_text(svg(rows, results["target_s"]))
    return page


def text(results: dict[str, Any]) -> str:
    """The page without its picture."""
    machine, target_s = results["machine"], results["target_s"]
    clock = {"wall": "", "processor": " Times are the engine's processor's: other work ran on the machine."}
    return "\n".join(
        [
            "# Chunks by what they cost",
            "",
            f"`{results['command']}`, commit {results['commit']}, {results['date']}; {machine['cpu']}, one core; "
            f"vLLM {machine['vllm']}, the tiny preset at float32 with 16,384 positions, replay off. "
            f"{results['streams']} requests decode all the time, while prompts come by ones and by threes: nineteen of "
            f"256 to 2,048 tokens and one of 10,240, {results['cycles']} times. The target is {1000 * target_s:.0f} ms "
            f"between two tokens, {results['times']:g} times what a step of decodes takes.{clock[results['clock']]}",
            "",
            "| must | | measured | |",
            "| --- | --- | ---: | --- |",
            *(f"| {x['limit']} | {x['must']} | {_percent(x['value'])} | {x['verdict']} |" for x in results["limits"]),
            "",
            "Same: answers to prompts equal to those of the first stock scheduler; in float32 a near tie may fall "
            "otherwise where matrices of other shapes are multiplied. P-PAS: vllm-project/vllm#52906, with the smaller "
            "budget under pressure and the larger one else; the plus also sees one long prefill as pressure.",
            "",
            "| chunks by | p50 ms | p90 ms | p99 ms | p99 / target | prefill tokens/s | beside ours | same |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(_line(each, results) for each in results["results"]),
            "",
        ]
    )


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:+.1%}"


def _line(each: dict[str, Any], results: dict[str, Any]) -> str:
    ours = next(x for x in results["results"] if x["kind"] == "ours")
    rate = each["prefill_tokens_per_second"]
    waits = " | ".join(f"{1000 * each[f'p{part}_s']:.0f}" for part in (50, 90, 99))
    return (
        f"| {each['name']} | {waits} | {each['p99_s'] / results['target_s']:.2f} | {rate:.0f} | "
        f"{rate / ours['prefill_tokens_per_second']:.2f} | {each['same']:.0%} |"
    )


WIDTH, HEIGHT, LEFT, TOP = 760, 420, 70, 30
COLOURS = {"ours": "#1f6feb", "stock": "#8b949e", "pressure": "#d29922"}


def svg(rows: list[dict[str, Any]], target_s: float) -> str:
    """Prefill over p99, a dot each; the band around the target is shaded."""
    most_x = 1.1 * max(each["p99_s"] for each in rows)
    most_y = 1.1 * max(each["prefill_tokens_per_second"] for each in rows)

    def at(x: float, y: float) -> tuple[float, float]:
        across, down = WIDTH - LEFT - 120, HEIGHT - TOP - 50
        return LEFT + across * x / most_x, TOP + down * (1 - y / most_y)

    (low, top), (high, bottom) = at((1 - BAND) * target_s, most_y), at((1 + BAND) * target_s, 0)
    parts = [
        f'<rect x="{low:.1f}" y="{top:.1f}" width="{high - low:.1f}" height="{bottom - top:.1f}" fill="#ddf4ff"/>',
        f'<line x1="{LEFT}" y1="{bottom:.1f}" x2="{WIDTH - 120}" y2="{bottom:.1f}" stroke="#8b949e"/>',
        f'<text x="{LEFT}" y="{HEIGHT - 12}">p99 between two tokens, to {1000 * most_x:.0f} ms; the target</text>',
        f'<text x="{LEFT}" y="20">prefill tokens a second, 0 to {most_y:.0f}</text>',
    ]
    for each in rows:
        x, y = at(each["p99_s"], each["prefill_tokens_per_second"])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[each["kind"]]}"/>')
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{escape(each["name"])}</text>')
    style = 'font-family="sans-serif" font-size="12" fill="#57606a"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {style}>', *parts, "</svg>", ""]
    )
