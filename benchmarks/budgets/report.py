"""What is asked of the budget, whether it is met, and a table of everything that was replayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

Runs = dict[str, dict[str, dict[str, float]]]
"""What each rule came to in each scene."""
OURS = ("early stop", "delayed", "ahead")
ALLOWED = 0.002
"""What ours may lose to the better of none and fixed 5."""


@dataclass(frozen=True)
class Target:
    """A bound on one number."""

    name: str
    value: float
    bound: float
    at_least: bool
    asked: bool = True
    """Whether it must be met; else it is shown."""

    @property
    def met(self) -> bool:
        """Whether it is kept to."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def verdict(self) -> str:
        """In words."""
        return ("met" if self.met else "not met") + ("" if self.asked else ", not asked")


def gain(runs: dict[str, dict[str, float]], rule: str, key: str = "throughput") -> float:
    """Of a rule over the better of none and fixed 5."""
    return runs[rule][key] / max(runs["none"][key], runs["fixed 5"][key]) - 1.0


def targets(headline: Runs, sweep: Runs, recorded: Runs, every: dict[str, Any]) -> list[Target]:
    """Ours at 60 sequences, means over seeds; and the worst of each curve over the concurrencies replayed.

    Of `ahead`, which decides before there are drafts, nothing was published that could be asked for at 60.
    """
    found = []
    for reading, prefix in (("drafts", "smooth, 60 "), ("tokens", "reading tokens, 60 ")):
        runs = [run for name, run in headline.items() if name.startswith(prefix)]
        for rule in OURS:
            name, asked = f"{rule}, 60 sequences, reading {reading}", rule != "ahead"
            found += [
                Target(
                    f"{name}: {key} / fixed 5", fmean(run[rule][of] / run["fixed 5"][of] for run in runs), *bound, asked
                )
                for key, of, bound in (
                    ("verified", "verified", (0.7, False)),
                    ("accepted", "accepted_length", (0.97, True)),
                )
            ]
    for part, title in ((sweep, ""), (recorded, "")):
        for curve in dict.fromkeys(name.rsplit(", ", 1)[0] for name in part):
            runs = [run for name, run in part.items() if name.startswith(f"{curve}, ")]
            for rule in OURS:
                worst = min(gain(run, rule) for run in runs)
                found.append(
                    Target(f"{rule}, {curve}{title}: the worst of {len(runs)} concurrencies", worst, -ALLOWED, True)
                )
    for curve, by_rule in every.get("curves", {}).items():
        for rule in OURS:
            worst, level = min(zip(by_rule[rule]["gain"], every["levels"], strict=True))
            first, last = every["levels"][0], every["levels"][-1]
            name = f"{rule}, {curve}: every concurrency from {first} to {last}, the worst at {level}"
            found.append(Target(name, worst, -ALLOWED, True))
    return found


def page(results: dict[str, Any]) -> str:
    """In Markdown; adds `targets` to the results."""
    found = targets(results["headline"], results["sweep"], results["recorded"], results["every"])
    results["targets"] = [{**asdict(target), "met": target.met} for target in found]
    lines = [
        "# The verification budget, replayed",
        "",
        f"`{results['command']}` at commit {results['commit']} on {results['date']}. Virtual time: results do not "
        "depend on the machine. Costs and texts are made up from DeepSeek's published figures, as "
        "`benchmarks/budgets/curves.py` and `texts.py` say; nothing here was measured on an accelerator. "
        "`Controller`, in each of its forms, is the one that engines use: `early stop` where it has the confidences of "
        "the drafts at hand, `delayed` where it has the step's before, `ahead` where drafts are not drawn yet.",
        "",
        "Throughput is that over the better of none and fixed 5, after the first quarter of a replay; in brackets of "
        "all of it. `verified` are drafts a request and step, of 5; `accepted` is the accepted length; `drafted` the "
        "part of the steps. The oracle knows the true costs and chances, as no lossless rule may.",
        "",
        "| target | value | bound | |",
        "| --- | ---: | ---: | --- |",
        *(
            f"| {each.name} | {each.value:.4f} | {'≥' if each.at_least else '≤'} {each.bound:g} | {each.verdict} |"
            for each in found
        ),
        *_every(results["every"]),
    ]
    for part, title, before in (
        ("headline", "At the published concurrencies", ()),
        ("recorded", "Over what an engine recorded", _recording(results["recording"])),
        ("changes", "When something is wrong or changes", ()),
        ("sweep", "Over concurrencies", ()),
    ):
        if results[part]:
            lines += ["", f"## {title}", "", *before, *_table(results[part])]
    return "\n".join(lines) + "\n"


def _recording(made: dict[str, Any]) -> list[str]:
    return [
        "Confidences and outcomes of the trained pair's greedy drafts at every place of its answers, by "
        f"`{made['command']}` at commit {made['commit']} on {made['date']} ({made['texts']} texts of {made['tokens']} "
        "tokens, `benchmarks/budgets/recorded.npz`); costs as above. Tokens are those that stood. The head is taken at "
        "its word: no calibration is loaded.",
        "",
    ]


def _every(every: dict[str, Any]) -> list[str]:
    """The least, the mean and the most gain of each rule."""
    if not every:
        return []
    lines = [
        "",
        "## Every concurrency",
        "",
        f"From {every['levels'][0]} to {every['levels'][-1]}, throughput over the better of none and fixed 5; "
        f"{every['steps']} steps, twice as many up to 16 sequences and half as many above 64, so fewer than in the "
        "other parts. The numbers of each are in the JSON.",
        "",
        "| costs | rule | least | at | mean | most |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for curve, by_rule in every["curves"].items():
        for rule, found in by_rule.items():
            worst, level = min(zip(found["gain"], every["levels"], strict=True))
            middle, most = fmean(found["gain"]), max(found["gain"])
            lines.append(
                f"| {curve} | {rule} | {100 * worst:+.2f} % | {level} | {100 * middle:+.2f} % | {100 * most:+.2f} % |"
            )
    return lines


def _table(runs: Runs) -> list[str]:
    lines = [
        "| scene | rule | throughput | verified | accepted | drafted |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, by_rule in runs.items():
        for rule, run in by_rule.items():
            percent = f"{100 * gain(by_rule, rule):+.2f} % ({100 * gain(by_rule, rule, 'whole'):+.2f} %)"
            lines.append(
                f"| {name} | {rule} | {percent} | {run['verified']:.2f} | {run['accepted_length']:.2f} "
                f"| {run['drafted']:.2f} |"
            )
    return lines
