"""What DSpark's decisions cost the host: microseconds of the controller's calls in a step, compiled and in Python.

Confidences are drawn at random, and costs are those of a table with context. One thread; the least and the median.

Example: python benchmarks/dspark_control.py --steps 200
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from facts import ROOT, facts, keep

POSITIONS, WARM = 5, 50
ASKED, ALLOWED_US = 256, 100.0
"""Of the compiled controller: a step of so many requests, and how long its plan may take."""
FORMS = {"early stop": "early-stop", "delayed": "delayed", "ahead": "delayed"}
CALLS = ("plan", "verified", "observe")


def main() -> None:
    """Measure, write the results, print the page."""
    args = _arguments()
    rows = [
        {"requests": requests, "form": form, "compiled": compiled, **measured(requests, form, args.steps, compiled)}
        for requests in args.requests
        for form in FORMS
        for compiled in (True, False)
    ]
    results = {**facts("" if sys.argv[1:] else "make bench-dspark"), "steps": args.steps, "results": rows}
    asked = [row for row in rows if row["requests"] == ASKED and row["compiled"]]
    results["limits"] = [
        {
            "form": row["form"],
            "value": row["plan"]["median"],
            "most": ALLOWED_US,
            "met": row["plan"]["median"] <= ALLOWED_US,
        }
        for row in asked
    ]
    print(keep(results, args.out, "dspark_control", text(results)).read_text())
    sys.exit(not all(limit["met"] for limit in results["limits"]))


def measured(requests: int, form: str, steps: int, compiled: bool) -> dict[str, dict[str, float]]:
    """Microseconds of each call: `plan`, `verified` and both `observe_*` together."""
    import numpy as np

    from deepinfer_vllm.native import drafts as native
    from deepinfer_vllm.spec_decode.calibration import Calibration
    from deepinfer_vllm.spec_decode.controller import Controller
    from deepinfer_vllm.spec_decode.cost_table import CostTable
    from deepinfer_vllm.spec_decode.settings import Settings

    library, native.library = native.library, native.library if compiled else lambda: None
    random = np.random.default_rng(requests)
    sizes = [1, 2, 4, *range(8, 2049, 8)]
    verify = [(n, context, 0.02 * (1 + n / 300) + 1e-8 * context) for n in sizes for context in (0, 1 << 20)]
    costs = CostTable.measured(verify, [(1, 0, 0.001), (256, 0, 0.003)], padded_to=512)
    controller = Controller(Calibration((1.2,) * POSITIONS), costs, Settings(FORMS[form], "off", "", grammar=False))
    scheduled, context = np.full(requests, POSITIONS), 2000 * requests
    took: dict[str, list[float]] = {name: [] for name in CALLS}
    try:
        for number in range(WARM + steps):
            said = random.random((requests, POSITIONS), np.float32) * 0.5 + 0.5
            survivals = np.cumprod(said, axis=1, dtype=np.float64)
            clock = [time.perf_counter()]
            if form == "ahead":
                plan = controller.plan_ahead(survivals, scheduled, requests, context, requests)
            else:
                plan = controller.plan(said, scheduled, requests, context, requests)
            clock.append(time.perf_counter())
            stands = np.cumprod(random.random((requests, POSITIONS)) < said, axis=1).sum(axis=1)
            accepted = np.minimum(stands, plan.drafts)
            begin = time.perf_counter()
            controller.verified(said, plan.drafts, accepted)
            clock.append(clock[-1] + time.perf_counter() - begin)
            begin = time.perf_counter()
            controller.observe_verify(requests + plan.budget, context, plan.seconds)
            controller.observe_draft(requests, context, 0.002)
            clock.append(clock[-1] + time.perf_counter() - begin)
            if number >= WARM:
                for name, before, after in zip(CALLS, clock, clock[1:], strict=False):
                    took[name].append(1e6 * (after - before))
    finally:
        native.library = library
    took["all"] = [sum(parts) for parts in zip(*took.values(), strict=True)]
    return {name: {"least": min(times), "median": median(times)} for name, times in took.items()}


def text(results: dict[str, Any]) -> str:
    """The page."""
    machine = results["machine"]
    return "\n".join(
        [
            "# What deciding about drafts costs the host",
            "",
            f"`{results['command']}`, commit {results['commit']}, {results['date']}; {machine['cpu']}, one "
            f"thread, {results['steps']} steps with {POSITIONS} drafts a request, confidences drawn at random, a "
            "calibration, costs padded to sizes of graphs. Microseconds, the median and in brackets the least: `plan` "
            "decides about a step, `verified` learns from what stood (of more than 64 requests not in every step), "
            "`observe` from what the step took.",
            "",
            "| requests | form | code | plan | verified | observe | all |",
            "| ---: | --- | --- | ---: | ---: | ---: | ---: |",
            *(
                f"| {row['requests']} | {row['form']} | {'compiled' if row['compiled'] else 'Python'} | "
                + " | ".join(f"{row[name]['median']:.0f} ({row[name]['least']:.0f})" for name in (*CALLS, "all"))
                + " |"
                for row in results["results"]
            ),
            "",
            *(
                f"- `plan`, {limit['form']}, {ASKED} requests, compiled: {limit['value']:.0f} of at most "
                f"{limit['most']:.0f}: {'met' if limit['met'] else 'not met'}."
                for limit in results["limits"]
            ),
            "",
        ]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--requests", type=int, nargs="+", default=[1, 16, 64, ASKED], help=f"default: 1 16 64 {ASKED}")
    add("--steps", type=int, default=1000, help="of each, after some that warm up; default: 1000")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for dspark_control.json and .md")
    args = parser.parse_args()
    for name, values in (("requests", args.requests), ("steps", [args.steps])):
        if not all(1 <= value <= 100_000 for value in values):
            parser.error(f"--{name} {' '.join(map(str, values))}: must lie in 1..100000")
    return args


if __name__ == "__main__":
    main()
