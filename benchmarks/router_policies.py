"""The router's policies in simulated fleets, beside rules of others: balance of decode, time to first token of prefill.

In virtual time, so the same on every machine and at any load of it. Exits 1 when a target is not met.

Example: python benchmarks/router_policies.py --seeds 2 --seconds 600 --steps 1000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from facts import ROOT, facts


def main() -> None:
    """Simulate, write the results, print the page."""
    args = _arguments()
    from fleets.report import write
    from fleets.scenes import decode_scenes, prefill_scenes, run_all

    results = {
        **facts("" if sys.argv[1:] else "make bench-router"),
        "seeds": args.seeds,
        "decode": run_all(decode_scenes(args.steps), args.seeds, args.jobs, _say),
        "prefill": run_all(prefill_scenes(args.seconds), args.seeds, args.jobs, _say),
    }
    page = write(results, args.out)
    print(page.read_text())
    sys.exit(any(target["verdict"] == "not met" for target in results["targets"]))


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, default=5, help="runs of each scene; default: 5")
    add("--seconds", type=float, default=1500.0, help="virtual, of each prefill run; default: 1500")
    add("--steps", type=int, default=2500, help="of each decode run; default: 2500")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once; default: one a core")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for router-policies.json, .md and .svg")
    args = parser.parse_args()
    for name, least in (("seeds", 1), ("seconds", 120), ("steps", 30), ("jobs", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name):g}: must be at least {least}")
    return args


if __name__ == "__main__":
    main()
