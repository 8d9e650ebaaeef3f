"""DSpark's verification budget on replayed texts and published cost curves, beside vLLM's rule, all drafts, and none.

In virtual time, so the same on every machine and at any load of it. Exits 1 when a target is not met.

Example: python benchmarks/dspark_budget.py --quick --out build/budget
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from facts import ROOT, facts, keep

QUICK = (16, 60)


def main() -> None:
    """Replay, write the results, print the targets."""
    args = _arguments()
    from budgets.plot import plot
    from budgets.report import gain, page
    from budgets.scenes import LEVELS, PUBLISHED, changes, headline, sweep

    levels = QUICK if args.quick else tuple(range(1, 257)) if args.every else LEVELS
    seeds, steps = (1, 50) if args.quick else (args.seeds, args.steps)
    results: dict[str, Any] = {
        **facts(),
        "headline": _replayed(headline(seeds, steps, QUICK[1:] if args.quick else PUBLISHED), args.jobs),
        "changes": _replayed({} if args.quick else changes(steps), args.jobs),
        "sweep": _replayed(sweep(levels, steps), args.jobs),
    }
    text = page(results)
    keep(results, args.out, "dspark-budget", text + "\n![throughput by concurrency](dspark-budget.png)\n")
    runs = {level: results["sweep"][f"padded, {level} sequences"] for level in levels}
    lines = {rule: [(level, 100 * gain(run, rule)) for level, run in runs.items()] for rule in runs[levels[0]]}
    plot(args.out / "dspark-budget.png", "throughput over the better of none and fixed 5, by sequences", lines)
    for target in results["targets"]:
        print(f"{'met    ' if target['met'] else 'NOT MET'} {target['value']:8.4f}  {target['name']}")
    sys.exit(not all(target["met"] for target in results["targets"]))


def _replayed(scenes: dict[str, Any], jobs: int) -> dict[str, dict[str, dict[str, float]]]:
    """What each rule came to in each scene."""
    from budgets.replay import RULES, replay

    work = [(name, rule) for name in scenes for rule in RULES]
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in scenes}
    with ProcessPoolExecutor(jobs) as pool:
        done = pool.map(replay, (replace(scenes[name], rule=rule) for name, rule in work))
        for number, ((name, rule), result) in enumerate(zip(work, done, strict=True), 1):
            found[name][rule] = asdict(result)
            if number % (8 * len(RULES)) == 0 or number == len(work):
                print(f"[{time.strftime('%H:%M:%S')}] {number} of {len(work)}: {name}", file=sys.stderr, flush=True)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="few and short replays, to see that it runs; targets are noise then")
    add("--every", action="store_true", help="sweep over every concurrency from 1 to 256, not 12 of them")
    add("--seeds", type=int, default=6, help="replays at the published concurrencies; default: 6")
    add("--steps", type=int, default=800, help="of a replay; twice as many with few sequences; default: 800")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="replays at once; default: one a core")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for dspark-budget.json, .md and .png")
    args = parser.parse_args()
    for name, least in (("seeds", 1), ("steps", 100), ("jobs", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    return args


if __name__ == "__main__":
    main()
