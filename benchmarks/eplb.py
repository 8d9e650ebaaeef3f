"""moe_lb of our placements of experts beside vLLM's, DeepSeek's public EPLB's and DeepInfer's, on replayed loads.

But for the seconds that `place` takes, the same on every machine. Exits 1 when a target is not met.

Example: python benchmarks/eplb.py --only "plain, prefill EP2" --out build/eplb
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from facts import ROOT, facts, keep

# One core is what a placement may use in an engine.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

SEED = 7


def main() -> None:
    """Replay, write the results, print the targets."""
    args = _arguments()
    from experts.replay import OURS, RIVALS, replay
    from experts.report import page
    from experts.scenes import scenes

    from deepinfer_vllm.eplb.picture import draw

    chosen = {name: scene for name, scene in scenes().items() if not args.only or name in args.only}
    if not chosen:
        raise SystemExit(f"eplb: no trace of that name; there are: {'; '.join(scenes())}")
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, done in zip(chosen, pool.map(partial(replay, seed=SEED), chosen.values()), strict=True):
            found[name] = {**asdict(chosen[name]), **done}
            print(f"[{time.strftime('%H:%M:%S')}] {len(found)} of {len(chosen)}: {name}", file=sys.stderr, flush=True)
    results = {
        **facts("" if sys.argv[1:] else "make bench-eplb"),
        "seed": SEED,
        "scenes": found,
        "seconds": {f"{window:,} steps": _seconds(window) for window in (100, 1000)},
    }
    text = page(results)
    keep(results, args.out, "eplb", text + "\n![moe_lb by trace](eplb.png)\n")
    series = (*RIVALS, OURS)
    groups = {
        str(number): {**{name: scene["rules"][name]["moe_lb"] for name in series}, "floor": scene["noise_floor"]}
        for number, scene in enumerate(found.values(), 1)
    }
    draw(args.out / "eplb.png", "moe_lb by trace, in the order of the table", groups)
    for target in results["targets"]:
        if not target["met"]:
            print(f"NOT MET {target['value']:8.4f} <= {target['bound']:.4f}  {target['name']}")
    met = sum(target["met"] for target in results["targets"])
    print(f"{met} of {len(results['targets'])} targets met")
    sys.exit(met < len(results["targets"]))


def _seconds(window: int) -> float:
    """Of one core for a placement of the released model on 64 ranks, from an earlier one: the median of three."""
    import numpy as np
    from experts.generator import Traffic, loads

    from deepinfer_vllm.eplb.policy import place

    counts = loads(Traffic(240 * 64, 60 * 64, 500.0), np.arange(2 * window), 40, SEED)
    before = place(counts[:window], 64, 448)
    taken = []
    for _ in range(3):
        start = time.process_time()
        place(counts[window:], 64, 448, current=before)
        taken.append(time.process_time() - start)
    return sorted(taken)[1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="name of a trace; may be repeated; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="traces at once; default: one a core")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results, help="for eplb.json, .md and .png; default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
