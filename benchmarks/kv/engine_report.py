"""What was measured inside engines, as JSON and as a table with the limits."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from facts import keep

MOST_OF_COMPUTED = 0.15
MOST_DECODE = 1.05


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Both limits: median ratio over the rounds, the interval in which it lies, and the verdict."""
    first = [x["from_store"] / x["computed"] for x in results["first_token"]]
    # An engine without the store would not have what its connector takes.
    decode = [x["on"] / (x["off"] - x["off_connector"]) for x in results["decode"]]
    found = (
        ("first token, from the store over computed", first, MOST_OF_COMPUTED),
        ("a token after it, stores running over no store", decode, MOST_DECODE),
    )
    return [
        {
            "name": name,
            "ratio": (ratio := median(ratios)),
            "interval": interval(ratios),
            "ratios": sorted(ratios),
            "must": must,
            "verdict": "met" if ratio <= must else "not met",
        }
        for name, ratios, must in found
    ]


def interval(values: list[float]) -> tuple[float, float]:
    """Between these the median lies with a probability of some 95 %, whatever the distribution; of few values, all."""
    ordered = sorted(values)
    passed = max(0, int(len(values) / 2 - sqrt(len(values))))
    return ordered[passed], ordered[-1 - passed]


def write(results: dict[str, Any], directory: Path) -> Path:
    """kvstore_engine.json and kvstore_engine.md in `directory`; the path of the latter."""
    results["limits"] = judge(results)
    return keep(results, directory, "kvstore_engine", table(results))


def table(results: dict[str, Any]) -> str:
    """A page in Markdown."""
    machine, plan = results["machine"], results["plan"]
    first, decode = results["first_token"], results["decode"]
    hit = first[0]["from_store_cached_tokens"]
    lines = [
        f"# The store inside an engine of the `{results['preset']}` preset",
        "",
        f"`{results['command']}` at commit {results['commit']} on {results['date']}: {machine['cpu']}, "
        f"{machine['cores']} cores, torch {machine['torch']}, vLLM {machine['vllm']}. "
        "Raw numbers are in the JSON file of the same name.",
        "",
        f"First token: a prompt of {plan['shared_tokens']} stored tokens and {plan['tail_tokens']} others, of which "
        f"{hit} tokens were found; each engine fresh, {len(first)} rounds in turn. Decode: {plan['decode_tokens']} "
        f"tokens after a prompt of {plan['decode_prompt_tokens']} that nobody has stored, {len(decode)} rounds in "
        f"turn in one engine, in each of which the store took {median(x['on_stored_blocks'] for x in decode):.0f} "
        "blocks of one prompt and was told to take none of another. Of the time without stores, what the connector "
        "plans is taken off. In brackets the interval in which the median lies with 95 % (of few rounds, all of them).",
        "",
        "| what | seconds |",
        "| --- | ---: |",
        f"| first token, computed | {median(x['computed'] for x in first):.2f} |",
        f"| first token, from the store | {median(x['from_store'] for x in first):.2f} |",
        f"| a token after it, without stores | {median(x['off'] for x in decode):.4f} |",
        f"| of which the connector plans | {median(x['off_connector'] for x in decode):.4f} |",
        f"| a token after it, with its stores running | {median(x['on'] for x in decode):.4f} |",
        "",
        "| limit | measured | must | |",
        "| --- | ---: | ---: | --- |",
    ]
    for row in judge(results):
        low, high = row["interval"]
        measured = f"{row['ratio']:.3f}× ({low:.3f} to {high:.3f})"
        lines.append(f"| {row['name']} | {measured} | {row['must']:g}× | {row['verdict']} |")
    return "\n".join(lines) + "\n"
