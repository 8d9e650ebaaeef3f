"""Speed of the erasure-coded store, 10+2 over twelve directories, beside the plain one in the same place.

Exits 1 when a limit is not met.

Example: python benchmarks/kvstore_ec.py --rounds 5 --directory /mnt/nvme
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from facts import ROOT, facts, keep

PAYLOAD_BYTES = 116_928
"""V4.1's packed block on SM90."""
REQUESTS = (1, 8)
LEAST_RATE = 0.6
"""Of the plain store's, when loading."""
MOST_P99 = 1.5
"""Times the 99th percentile without a slow root."""
DELAY_SECONDS = 0.05
WAYS = {"auto": "past the page cache", "off": "from the page cache"}


def main() -> None:
    """Measure, write the results, print the table."""
    args = _arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = {**facts("" if sys.argv[1:] else "make bench-kvstore"), **measure(args)}
    results["limits"] = judge(results)
    keep(results, args.out, "kvstore_ec")
    print(table(results))
    sys.exit(any(limit["verdict"] == "not met" for limit in results["limits"]))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything."""
    from kv import erasure

    rates = []
    for direct in WAYS:
        for requests in REQUESTS:
            _say(f"{requests} requests at once, {WAYS[direct]}")
            with tempfile.TemporaryDirectory(dir=args.directory, prefix="kvstore-ec-") as scratch:
                times = erasure.rates(Path(scratch), PAYLOAD_BYTES, requests, args.blocks, args.rounds, direct=direct)
            rates.append({"direct": direct, "requests": requests, "blocks": args.blocks, "seconds": times})
    _say("one root slowed")
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="kvstore-ec-") as scratch:
        latencies = erasure.latencies(Path(scratch), PAYLOAD_BYTES, args.turns, DELAY_SECONDS)
    _say("two roots removed")
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="kvstore-ec-") as scratch:
        removed = erasure.removed(Path(scratch), PAYLOAD_BYTES, 8 * args.blocks)
    return {
        "code": erasure.CODE,
        "payload_bytes": PAYLOAD_BYTES,
        "rates": rates,
        "delay_seconds": DELAY_SECONDS,
        "latency_blocks": erasure.SLOW_BLOCKS,
        "latency_seconds": latencies,
        "two_roots_removed_every_byte_right": removed,
    }


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Every limit: median over rounds of the ratio in one round, or of percentiles."""
    limits = []
    for rate in results["rates"]:
        loads = rate["seconds"]["load"]
        ratio = median(plain / ec for plain, ec in zip(loads["plain"], loads["ec"], strict=True))
        what = f"load, {rate['requests']} requests, {WAYS[rate['direct']]}: rate over the plain store's"
        limits.append({"what": what, "found": ratio, "least": LEAST_RATE, "verdict": _met(ratio >= LEAST_RATE)})
    quick, slowed = (p99(results["latency_seconds"][name]) for name in ("quick", "slowed"))
    ratio = slowed / quick
    limits.append(
        {
            "what": "p99 with a slow root over without",
            "found": ratio,
            "most": MOST_P99,
            "verdict": _met(ratio <= MOST_P99),
        }
    )
    right = results["two_roots_removed_every_byte_right"]
    limits.append({"what": "every byte right with two roots removed", "found": right, "verdict": _met(right)})
    return limits


def p99(seconds: list[float]) -> float:
    """99th percentile."""
    return quantiles(seconds, n=100)[98]


def table(results: dict[str, Any]) -> str:
    """What was found, in Markdown."""
    lines = ["| what | found | limit | verdict |", "| --- | ---: | ---: | --- |"]
    for limit in results["limits"]:
        bound = f">= {limit['least']}" if "least" in limit else f"<= {limit['most']}" if "most" in limit else ""
        found = limit["found"] if isinstance(limit["found"], bool) else f"{limit['found']:.2f}"
        lines.append(f"| {limit['what']} | {found} | {bound} | {limit['verdict']} |")
    lines += ["", "| requests | way | plain store, GB/s | coded store | plain load | coded load |"]
    lines.append("| ---: | --- | ---: | ---: | ---: | ---: |")
    for rate in results["rates"]:
        size = results["payload_bytes"] * rate["requests"] * rate["blocks"] / 1e9
        times = [rate["seconds"][what][who] for what in ("store", "load") for who in ("plain", "ec")]
        speeds = " | ".join(f"{size / median(seconds):.2f}" for seconds in times)
        lines.append(f"| {rate['requests']} | {WAYS[rate['direct']]} | {speeds} |")
    lines.append("")
    for name, seconds in results["latency_seconds"].items():
        ms = [f"{1e3 * value:.1f} ms" for value in (median(seconds), p99(seconds))]
        lines.append(f"{results['latency_blocks']} blocks, {name}: median {ms[0]}, p99 {ms[1]}")
    return "\n".join(lines)


def _met(met: bool) -> str:
    return "met" if met else "not met"


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=15, help="of stores and loads of each kind, after one that warms up; default: 15")
    add("--blocks", type=int, default=128, help="of each request; default: 128")
    add("--turns", type=int, default=16, help="of 25 requests with and 25 without a slow root; default: 16")
    add("--directory", type=Path, help="where the bytes go and are removed again; default: the temporary directory")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for kvstore_ec.json")
    args = parser.parse_args()
    for name in ("rounds", "blocks", "turns"):
        if getattr(args, name) < 2:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 2")
    if args.directory and not args.directory.is_dir():
        parser.error(f"--directory {args.directory}: no such directory")
    return args


if __name__ == "__main__":
    main()
