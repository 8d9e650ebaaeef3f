"""Speed of the store's transfers beside vLLM's own file tier and a plain file, in the same directory and in turns.

Exits 1 when a limit is not met. `benchmarks/kvstore_engine.py` measures the same inside an engine.

Example: python benchmarks/kvstore.py --rounds 3 --directory /mnt/nvme
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from facts import ROOT, facts

PAYLOAD_BYTES = (116_928, 212_256)
"""V4.1's packed block on SM90 (64 tokens, fp8) and on SM100 (128 tokens, fp8)."""
REQUESTS = (1, 8)
MOST_BYTES = 2 << 30
"""On disk at once."""


def main() -> None:
    """Measure, write the results, print the page."""
    args = _arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from kv.contender import Shape

    shapes = [Shape(size, requests, args.blocks) for size in PAYLOAD_BYTES for requests in REQUESTS]
    if (needed := max(shape.disk_bytes(args.rounds) for shape in shapes)) > MOST_BYTES:
        sys.exit(f"kvstore.py: {needed >> 20} MiB on disk, at most {MOST_BYTES >> 20}: take fewer --rounds or --blocks")
    from kv.report import write
    from kv.rounds import measure

    times: dict[Shape, dict[str, list[Any]]] = {shape: {} for shape in shapes}
    for session in range(args.sessions):
        for shape in shapes:
            _say(f"session {session + 1} of {args.sessions}: {shape}")
            with tempfile.TemporaryDirectory(dir=args.directory, prefix="kvstore-") as scratch:
                for contest, found in measure(Path(scratch), shape, args.rounds, args.threads).items():
                    times[shape].setdefault(contest, []).extend(found)
            os.sync()  # what was removed is given back now, not during the next session
    results = {
        **facts("" if sys.argv[1:] else "make bench-kvstore"),
        "rounds": args.sessions * args.rounds,
        "threads": args.threads,
        "shapes": [{**asdict(shape), "times": found} for shape, found in times.items()],
    }
    page = write(results, args.out, "kvstore")
    print(page.read_text())
    sys.exit(any(limit["verdict"] == "not met" for limit in results["limits"]))


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sessions", type=int, default=5, help="over all shapes, each with new files; default: 5")
    add("--rounds", type=int, default=2, help="of every shape in a session, after one that warms up; default: 2")
    add("--blocks", type=int, default=96, help="of each request; default: 96")
    add("--threads", type=int, default=8, help="of the store and of the raw file; default: 8, the store's own")
    add("--directory", type=Path, help="where the bytes go and are removed again; default: the temporary directory")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for kvstore.json, .md and .svg")
    args = parser.parse_args()
    for name in ("sessions", "rounds", "blocks", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.directory and not args.directory.is_dir():
        parser.error(f"--directory {args.directory}: no such directory")
    return args


if __name__ == "__main__":
    main()
