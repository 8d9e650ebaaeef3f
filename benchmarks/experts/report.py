"""What is asked of the policy, whether it is met, and a table of everything that was replayed."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, stdev
from typing import Any

from experts.replay import OURS, RIVALS

EXPERT_BYTES = 18_800_640
"""One routed expert of the released model: what a slot that changes receives."""
LAYERS = 40
NOISE = 2.0
"""Standard errors of the mean of paired differences: `not higher` means by no more than this."""
CLOSE = 0.01
"""A rival that is nearer to the noise floor need not be beaten."""


def targets(scenes: dict[str, Any], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """Each with `name`, `value`, `bound` and `met`."""
    found = []
    for name, scene in scenes.items():
        ours = scene["rules"][OURS]
        if scene["goal"]:
            value = ours["moe_lb"]
            found.append({"name": f"{name}: moe_lb", "value": value, "bound": scene["goal"]})
        for rival in RIVALS:
            other = scene["rules"][rival]
            pairs = [a - b for a, b in zip(ours["parts"], other["parts"], strict=True)]
            noise = NOISE * stdev(pairs) / sqrt(len(pairs))
            lower = other["moe_lb"] > (1 + CLOSE) * scene["noise_floor"]
            found.append(
                {
                    "name": f"{name}: ours - {rival}" + (", to be lower" if lower else ""),
                    "value": fmean(pairs),
                    "bound": 0.0 if lower else noise,
                    "noise": noise,
                }
            )
    for name, value in seconds.items():
        found.append({"name": f"seconds of one core, {name}", "value": value, "bound": 1.0})
    return [{**one, "met": bool(one["value"] <= one["bound"])} for one in found]


def page(results: dict[str, Any]) -> str:
    """In Markdown; adds `targets` to the results."""
    found = results["targets"] = targets(results["scenes"], results["seconds"])
    missed = [one for one in found if not one["met"]]
    lines = [
        "# Placements of experts, replayed",
        "",
        f"`{results['command']}` at commit {results['commit']} on {results['date']}. But for the seconds, results do "
        "not depend on the machine. Loads are made up as `benchmarks/experts/generator.py` says, or are what the mid "
        "model's routers chose on made-up texts, put together to steps by `benchmarks/experts/recorded.py`. Each rule "
        "sees the window before a rearrangement and is measured on the steps from there to the next.",
        "",
        "moe_lb is the sum over steps and layers of the slowest rank over that of the mean. In brackets: slots changed "
        "a layer and rearrangement, the first left out. `floor` is what the draw of tokens alone makes of ranks with "
        "equal shares, `hindsight` our placement made for the very steps that measure it, `hard` what no placement "
        "comes below (mean, or the largest indivisible part).",
        "",
        *_table(results["scenes"]),
        "",
        f"A slot that changes receives {EXPERT_BYTES / 1e6:.1f} MB in the released model. Over its {LAYERS} layers, a "
        "rearrangement therefore moves:",
        "",
        *_bytes(results["scenes"]),
        "",
        "## Seconds of one core",
        "",
        "40 layers, 384 experts, 448 slots on 64 ranks, from what lies there to the next placement.",
        "",
        "| window | seconds |",
        "| --- | ---: |",
        *(f"| {name} | {value:.2f} |" for name, value in results["seconds"].items()),
        "",
        f"## Targets: {len(found) - len(missed)} of {len(found)} met",
        "",
        "Differences to rivals are means over layers and rearrangements; not higher means by no more than "
        f"{NOISE:g} standard errors. Where a rival is more than {CLOSE:.0%} above the floor, ours is to be lower.",
        "",
        "| target | value | bound | |",
        "| --- | ---: | ---: | --- |",
        *(
            f"| {one['name']} | {one['value']:.4f} | ≤ {one['bound']:.4f} | {'met' if one['met'] else 'not met'} |"
            for one in found
            if not one["met"] or "noise" not in one
        ),
        "",
        "Comparisons with rivals that are met are in the JSON file of the same name.",
    ]
    return "\n".join(lines) + "\n"


def _table(scenes: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(rule for scene in scenes.values() for rule in scene["rules"]))
    lines = [
        f"| trace | choices a rank | hottest / mean | {' | '.join(names)} | floor | hindsight | hard |",
        "| --- |" + " ---: |" * (len(names) + 5),
    ]
    for name, scene in scenes.items():
        rules = scene["rules"]
        cells = [f"{rules[n]['moe_lb']:.4f} ({rules[n]['moves_a_layer']:.0f})" if n in rules else "" for n in names]
        lines.append(
            f"| {name} | {scene['choices_a_rank']:,.0f} | {scene['hottest']:.1f} | {' | '.join(cells)} | "
            f"{scene['noise_floor']:.4f} | {scene['hindsight']:.4f} | {scene['hard_bound']:.4f} |"
        )
    return lines


def _bytes(scenes: dict[str, Any]) -> list[str]:
    rules = ("vLLM", OURS)
    lines = [f"| trace | {' | '.join(rules)} |", "| --- | ---: | ---: |"]
    for name, scene in scenes.items():
        if name.startswith("plain"):
            moved = [scene["rules"][rule]["moves_a_layer"] * LAYERS * EXPERT_BYTES / 1e9 for rule in rules]
            lines.append(f"| {name} | {' | '.join(f'{each:,.1f} GB' for each in moved)} |")
    return lines
