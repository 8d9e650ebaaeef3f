"""What is asked of the policies, whether it is met, and tables of everything that was simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from facts import keep

from deepinfer_simulator.bars import svg
from deepinfer_simulator.prefill_stats import STABLE_DRIFT
from fleets.scenes import LOADS, OVERFLOWS

Runs = dict[str, list[dict[str, Any]]]
"""What a scene came to, seed by seed."""
NOISE = 2.0
"""Standard errors: `not worse` means by no more than this."""


@dataclass(frozen=True)
class Target:
    """A bound on one number: at least `must` where `aim` or the name says more is better, else at most."""

    name: str
    value: float
    must: float
    at_least: bool
    aim: float | None = None
    noise: float = 0.0
    """What the value may miss the bound by: of paired runs, NOISE standard errors of their mean."""

    @property
    def verdict(self) -> str:
        """What is met."""

        def reaches(bound: float) -> bool:
            return self.value >= bound - self.noise if self.at_least else self.value <= bound + self.noise

        if not reaches(self.must):
            return "not met"
        if self.aim is None:
            return "met"
        return "met, aim too" if reaches(self.aim) else "met, aim missed"


def targets(decode: Runs, prefill: Runs) -> list[Target]:
    """Every one whose scenes were run."""
    found = []
    if decode:
        found += [
            Target("decode balance, one router, views 0.2 s old", _eta(decode, "router x1, 0.2 s"), 0.93, True),
            Target("decode balance, 8 replicas, views 0.2 s old", _eta(decode, "router x8, 0.2 s"), 0.92, True, 0.94),
        ]
    if prefill:
        stationary = [f"{chunks}, {name}" for chunks in ("fixed 0.65", "budget 0.75") for name in OVERFLOWS]
        found += [
            Target(
                "fixed chunks: highest stable load over a mixed pool's",
                _stable(prefill, "pools") / _stable(prefill, "mixed"),
                1.15,
                True,
                1.2,
            ),
            Target(
                "fixed chunks 0.65, no overflow: <16K p99, s",
                _short(prefill, "fixed 0.65, pools, no overflow"),
                0.55,
                False,
            ),
            Target("fixed chunks 0.65, overflow: mean, s", _mean(prefill, "fixed 0.65, pools"), 2.5, False),
            _no_worse(prefill, "mean", lambda run: run["mean_s"]),
            _no_worse(prefill, "<16K p99", lambda run: run["groups"][0]["p99_s"]),
            Target(
                "16 engines, stationary: moves a minute, the most of any run", _moves(prefill, stationary), 2.0, False
            ),
            Target(
                "16 engines, shifting: moves a minute, the most of any run",
                _moves(prefill, [name for name in prefill if "shifting" in name]),
                3.0,
                False,
            ),
            _least_work(prefill),
        ]
    return found


def write(results: dict[str, Any], directory: Path) -> Path:
    """router-policies.json, .md and .svg in `directory`; the path of the page."""
    found = targets(results["decode"], results["prefill"])
    results["targets"] = [{**asdict(target), "verdict": target.verdict} for target in found]
    if not results["decode"]:
        return keep(results, directory, "router-policies", table(results))
    plot = "\n![decode balance](router-policies.svg)\n"
    page = keep(results, directory, "router-policies", table(results) + plot)
    bars = [(name, _eta(results["decode"], name)) for name in results["decode"]]
    page.with_suffix(".svg").write_text(svg("decode balance of 64 ranks", bars))
    return page


def table(results: dict[str, Any]) -> str:
    """A page in Markdown."""
    machine = results["machine"]
    lines = [
        "# The router's policies in simulated fleets",
        "",
        f"`{results['command']}` at commit {results['commit']} on {results['date']}: {machine['cpu']}, Python "
        f"{machine['python']}. Virtual time: results do not depend on the machine. {results['seeds']} seeds; means "
        "over them, in brackets the least and the most.",
        "",
        "The models are in `simulator/`: they rank policies and predict no machine. The classes that choose are the "
        "router's own. Conversation trace of Mooncake; for prefill with lengths times 2.5, so that all groups have "
        "prompts, and hits as in a store of unbounded size that all engines share, so that following prefixes gains "
        "nothing here.",
        "",
        "Left out: what decode and prefill do to each other in one engine, transfers of KV, failures, admission, "
        "engines' own prefix caches, errors of predicted costs, and the time that a router takes. Policies do not know "
        "how long answers will be; they know prompts and hits.",
        "",
        "| target | measured | must | aim | |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for target in results["targets"]:
        sign = "≥" if target["at_least"] else "≤"
        aim = "" if target["aim"] is None else f"{sign} {target['aim']:g}"
        noise = f" ± {target['noise']:.3f}" if target["noise"] else ""
        value = f"{target['value']:.3f}{noise}"
        lines.append(f"| {target['name']} | {value} | {sign} {target['must']:g} | {aim} | {target['verdict']} |")
    if results["decode"]:
        lines += [
            "",
            "## Decode",
            "",
            "64 ranks in lock-step, 60 requests a rank in flight; `exact`: everything is known at once. All replicas "
            "poll at the same moment, the worst case. Throughput is proportional to the balance.",
            "",
            "| policy | balance | requests, spread | KV tokens, spread |",
            "| --- | ---: | ---: | ---: |",
        ]
        for name, runs in results["decode"].items():
            spreads = [f"{100 * fmean(run[key] for run in runs):.0f} %" for key in ("requests_spread", "kv_spread")]
            lines.append(f"| {name} | {_range([run['eta'] for run in runs], 3)} | {' | '.join(spreads)} |")
    if results["prefill"]:
        lines += [
            "",
            "## Prefill",
            "",
            "16 engines of 4 ranks in lock-step (`independent`: 32 of one), load as a share of what the ranks could "
            "compute if none waited for another. `fixed`: 8,192 tokens a step; `budget`: 0.2 s a step. `shifting`: "
            "prompts of 64K and more come four times as often in every second five minutes. Seconds to the first "
            f"token. Where their mean grows more than {STABLE_DRIFT:g} times (`drift`) from the first quarter of a run "
            "to the last, queues grow, and times with the length of the run: not stable.",
            "",
            "| scene | mean | <16K p50 / p99 | 16K–64K p99 | 64K–256K p99 | ≥256K p99 | lock-step efficiency | drift "
            "| moves/min |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, runs in results["prefill"].items():
            groups = [[run["groups"][g] for run in runs] for g in range(4)]
            p99 = [f"{fmean(group['p99_s'] for group in of_one):.2f}" for of_one in groups]
            p50 = f"{fmean(group['p50_s'] for group in groups[0]):.2f}"
            drift = _drift(runs)
            stable = "" if drift <= STABLE_DRIFT else ", not stable"
            moves = fmean(run["moves_per_minute"] for run in runs)
            lines.append(
                f"| {name} | {_range([run['mean_s'] for run in runs], 2)} | {p50} / {p99[0]} | {' | '.join(p99[1:])} "
                f"| {fmean(run['efficiency'] for run in runs):.3f} | {drift:.2f}{stable} | {moves:.1f} |"
            )
        lines += ["", *_said(results["prefill"])]
    return "\n".join(lines) + "\n"


def _said(prefill: Runs) -> list[str]:
    """Where pools cost something."""

    def p99(name: str, group: int) -> float:
        return fmean(run["groups"][group]["p99_s"] for run in prefill[name])

    lines = []
    mixed, pools = (f"budget shifting, {name}" for name in ("mixed", "pools"))
    longer = ", ".join(
        f"{name} {p99(mixed, g):.1f} to {p99(pools, g):.1f} s"
        for g, name in ((1, "16K–64K"), (2, "64K–256K"), (3, "≥256K"))
    )
    lines.append(
        f"Where traffic shifts, pools take the p99 of <16K from {p99(mixed, 0):.1f} to {p99(pools, 0):.1f} s, and "
        f"longer groups pay: {longer}; mean {_mean(prefill, mixed):.2f} to {_mean(prefill, pools):.2f} s."
    )
    mixed, pools = (f"independent 0.8, {name}" for name in ("mixed", "pools"))
    lines.append(
        f"Independent engines with exact costs: mean {_mean(prefill, pools):.2f} s with pools, "
        f"{_mean(prefill, mixed):.2f} s with `pools: off`, which is least work left: pools lose there."
    )
    return lines


def _eta(decode: Runs, name: str) -> float:
    return fmean(run["eta"] for run in decode[name])


def _mean(prefill: Runs, name: str) -> float:
    return fmean(run["mean_s"] for run in prefill[name])


def _short(prefill: Runs, name: str) -> float:
    return fmean(run["groups"][0]["p99_s"] for run in prefill[name])


def _drift(runs: list[dict[str, Any]]) -> float:
    return fmean(run["drift"] for run in runs)


def _stable(prefill: Runs, name: str) -> float:
    """Highest load up to which every one is stable, by the mean over seeds; 0: none is."""
    highest = 0.0
    for load in LOADS[name]:
        if _drift(prefill[f"fixed {load:g}, {name}"]) > STABLE_DRIFT:
            break
        highest = load
    return highest


def _moves(prefill: Runs, names: list[str]) -> float:
    return max(run["moves_per_minute"] for name in names for run in prefill[name])


def _no_worse(prefill: Runs, what: str, number: Any) -> Target:
    pairs = zip(prefill["budget 0.75, pools"], prefill["budget 0.75, mixed"], strict=True)
    ratios = [number(pools) / number(mixed) for pools, mixed in pairs]
    return Target(f"budget chunks 0.75: {what} over a mixed pool's", fmean(ratios), 1.0, False, noise=_noise(ratios))


def _least_work(prefill: Runs) -> Target:
    pairs = zip(prefill["independent 0.8, mixed"], prefill["independent 0.8, least-work"], strict=True)
    ratios = [off["mean_s"] / least["mean_s"] for off, least in pairs]
    name = "independent engines, pools off: mean over least work left"
    return Target(name, fmean(ratios), 1.0, False, noise=_noise(ratios))


def _noise(ratios: list[float]) -> float:
    return NOISE * stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0


def _range(values: list[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"
