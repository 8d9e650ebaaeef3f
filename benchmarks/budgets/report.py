"""What is asked of the budget, whether it is met, and a table of everything that was replayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

Runs = dict[str, dict[str, dict[str, float]]]
"""What each rule came to in each scene."""
OURS = ("early stop", "delayed")
ALLOWED = 0.002
"""What ours may lose to the better of none and fixed 5."""


@dataclass(frozen=True)
class Target:
    """A bound on one number."""

    name: str
    value: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it is kept to."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def gain(runs: dict[str, dict[str, float]], rule: str, key: str = "throughput") -> float:
    """Of a rule over the better of none and fixed 5."""
    return runs[rule][key] / max(runs["none"][key], runs["fixed 5"][key]) - 1.0


def targets(headline: Runs, sweep: Runs) -> list[Target]:
    """Ours at 60 sequences, means over seeds; and the worst of each curve over the concurrencies replayed."""
    found = []
    for reading, prefix in (("drafts", "smooth, 60 "), ("tokens", "reading tokens, 60 ")):
        runs = [run for name, run in headline.items() if name.startswith(prefix)]
        for rule in OURS:
            verified = fmean(run[rule]["verified"] / run["fixed 5"]["verified"] for run in runs)
            accepted = fmean(run[rule]["accepted_length"] / run["fixed 5"]["accepted_length"] for run in runs)
            found += [
                Target(f"{rule}, 60 sequences, reading {reading}: verified / fixed 5", verified, 0.7, False),
                Target(f"{rule}, 60 sequences, reading {reading}: accepted / fixed 5", accepted, 0.97, True),
            ]
    for curve in dict.fromkeys(name.rsplit(", ", 1)[0] for name in sweep):
        runs = [run for name, run in sweep.items() if name.startswith(f"{curve}, ")]
        for rule in OURS:
            worst = min(gain(run, rule) for run in runs)
            found.append(Target(f"{rule}, {curve}: the worst of its concurrencies", worst, -ALLOWED, True))
    return found


def page(results: dict[str, Any]) -> str:
    """In Markdown; adds `targets` to the results."""
    found = targets(results["headline"], results["sweep"])
    results["targets"] = [{**asdict(target), "met": target.met} for target in found]
    lines = [
        "# The verification budget, replayed",
        "",
        f"`{results['command']}` at commit {results['commit']} on {results['date']}. Virtual time: results do not "
        "depend on the machine. Costs and texts are made up from DeepSeek's published figures, as "
        "`benchmarks/budgets/curves.py` and `texts.py` say; nothing here was measured on an accelerator. `Controller`, "
        "in both forms, is the one that engines use.",
        "",
        "Throughput is that over the better of none and fixed 5, after the first quarter of a replay; in brackets of "
        "all of it. `verified` are drafts a request and step, of 5; `accepted` is the accepted length; `drafted` the "
        "part of the steps. The oracle knows the true costs and chances, as no lossless rule may.",
        "",
        "| target | value | bound | |",
        "| --- | ---: | ---: | --- |",
        *(
            f"| {each.name} | {each.value:.4f} | {'≥' if each.at_least else '≤'} {each.bound:g} "
            f"| {'met' if each.met else 'not met'} |"
            for each in found
        ),
    ]
    for part, title in (
        ("headline", "At the published concurrencies"),
        ("changes", "When something is wrong or changes"),
        ("sweep", "Over concurrencies"),
    ):
        lines += ["", f"## {title}", "", *_table(results[part])]
    return "\n".join(lines) + "\n"


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
