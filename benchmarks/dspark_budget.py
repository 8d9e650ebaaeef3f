"""DSpark's verification budget on replayed texts and published cost curves, beside vLLM's rule, all drafts, and none.

In virtual time, so the same on every machine and at any load of it. Exits 1 when a target is not met. With `--record`
it writes the texts of an engine that are replayed among others, and ends.

Example: python benchmarks/dspark_budget.py --quick --out build/budget
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from facts import ROOT, facts, keep

QUICK = (16, 60)
TEXTS, TOKENS = 60, 256
"""That `--record` records, and of each."""


def main() -> None:
    """Replay, write the results, print the targets."""
    args = _arguments()
    from budgets.recorded import FILE, origin

    if args.record:
        from budgets.record import record

        record(FILE, TEXTS, TOKENS, {**facts(), "texts": TEXTS, "tokens": TOKENS})
        return
    from budgets.every import gains, together
    from budgets.plot import plot
    from budgets.report import gain, page
    from budgets.scenes import EVERYWHERE, LEVELS, PUBLISHED, changes, curves, headline, recorded, sweep

    levels = QUICK if args.quick else LEVELS
    seeds, steps = (1, 50) if args.quick else (args.seeds, args.steps)
    run = _together(gains, args.jobs)
    costs = {name: curves()[name] for name in EVERYWHERE}
    every = {} if args.quick or not args.every else together(costs, range(1, 257), args.every, run)
    results: dict[str, Any] = {
        **facts("" if sys.argv[1:] else "make bench-dspark"),
        "headline": _replayed(headline(seeds, steps, QUICK[1:] if args.quick else PUBLISHED), args.jobs),
        "recording": origin(),
        "recorded": _replayed(recorded(steps, QUICK if args.quick else LEVELS), args.jobs),
        "changes": _replayed({} if args.quick else changes(steps), args.jobs),
        "sweep": _replayed(sweep(levels, steps), args.jobs),
        "every": every and {"levels": list(range(1, 257)), "steps": args.every, "curves": every},
    }
    text = page(results)
    keep(results, args.out, "dspark_budget", text + "\n![throughput by concurrency](dspark_budget.png)\n")
    plot(
        args.out / "dspark_budget.png",
        "throughput over the better of none and fixed 5, by sequences",
        _lines(results, gain),
    )
    for target in results["targets"]:
        print(f"{'met    ' if target['met'] else 'NOT MET'} {target['value']:8.4f}  {target['name']}")
    sys.exit(not all(target["met"] for target in results["targets"] if target["asked"]))


def _lines(results: dict[str, Any], gain: Callable[..., float]) -> dict[str, list[tuple[int, float]]]:
    """Percent by concurrency of each rule, on padded costs: of every one where they were replayed."""
    every = results["every"]
    runs = {int(name.split()[-2]): run for name, run in results["sweep"].items() if name.startswith("padded, ")}
    lines = {
        rule: [(level, 100 * gain(run, rule)) for level, run in runs.items()] for rule in next(iter(runs.values()))
    }
    for rule, found in (every["curves"]["padded"] if every else {}).items():
        lines[rule] = list(zip(every["levels"], (100 * value for value in found["gain"]), strict=True))
    return lines


def _replayed(scenes: dict[str, Any], jobs: int) -> dict[str, dict[str, dict[str, float]]]:
    """What each rule came to in each scene."""
    from budgets.replay import RULES, replay

    work = [(name, rule) for name in scenes for rule in RULES if not (scenes[name].recorded and rule == "oracle")]
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in scenes}
    done = _together(replay, jobs)([replace(scenes[name], rule=rule) for name, rule in work])
    for (name, rule), result in zip(work, done, strict=True):
        found[name][rule] = asdict(result)
    return found


def _together(call: Callable[[Any], Any], jobs: int) -> Callable[[list[Any]], Iterable[Any]]:
    """Results in order, of so many processes, which say how far they are."""

    def run(work: list[Any]) -> Iterator[Any]:
        with ProcessPoolExecutor(jobs) as pool:
            for number, result in enumerate(pool.map(call, work, chunksize=4), 1):
                yield result
                if number % 64 == 0 or number == len(work):
                    print(f"[{time.strftime('%H:%M:%S')}] {number} of {len(work)}", file=sys.stderr, flush=True)

    return run


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="few and short replays, to see that it runs; targets are noise then")
    add("--every", type=int, default=600, help="steps at every concurrency from 1 to 256; 0 for none; default: 600")
    add("--seeds", type=int, default=6, help="replays at the published concurrencies; default: 6")
    add("--steps", type=int, default=800, help="of a replay; twice as many with few sequences; default: 800")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="replays at once; default: one a core")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for dspark_budget.json, .md and .png")
    add("--record", action="store_true", help="write benchmarks/budgets/recorded.npz by an engine; two minutes")
    args = parser.parse_args()
    for name, least in (("seeds", 1), ("steps", 100), ("jobs", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    if args.every and args.every < 100:
        parser.error(f"--every {args.every}: must be 0, or at least 100")
    return args


if __name__ == "__main__":
    main()
