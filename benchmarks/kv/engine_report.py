"""What was measured inside engines, as JSON and as a table with the limits."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from facts import keep

MOST_OF_COMPUTED = 0.15
MOST_DECODE = 1.05


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Both limits: median ratio over the rounds, every round's, and the verdict."""
    found = (
        ("first token, from the store over computed", "first_token", "from_store", "computed", MOST_OF_COMPUTED),
        ("a token after it, stores running over no store", "decode", "on", "off", MOST_DECODE),
    )
    return [
        {
            "name": name,
            "ratio": (ratio := median(x[over] / x[under] for x in results[what])),
            "ratios": sorted(x[over] / x[under] for x in results[what]),
            "must": must,
            "verdict": "met" if ratio <= must else "not met",
        }
        for name, what, over, under, must in found
    ]


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
        f"turn, in each of which the store took {median(x['stored_blocks'] for x in decode):.0f} blocks.",
        "",
        "| what | seconds |",
        "| --- | ---: |",
        f"| first token, computed | {median(x['computed'] for x in first):.2f} |",
        f"| first token, from the store | {median(x['from_store'] for x in first):.2f} |",
        f"| a token after it, without the store | {median(x['off'] for x in decode):.4f} |",
        f"| a token after it, with its stores running | {median(x['on'] for x in decode):.4f} |",
        "",
        "| limit | measured | must | |",
        "| --- | ---: | ---: | --- |",
    ]
    for row in judge(results):
        low, high = row["ratios"][0], row["ratios"][-1]
        measured = f"{row['ratio']:.3f}× ({low:.3f} to {high:.3f})"
        lines.append(f"| {row['name']} | {measured} | {row['must']:g}× | {row['verdict']} |")
    return "\n".join(lines) + "\n"
