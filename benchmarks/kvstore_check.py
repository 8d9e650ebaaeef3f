"""Speed of CHECK: hashing a prompt beside vLLM's own hashing, and asking a daemon whose index has a million blocks.

Exits 1 when a limit is not met.

Example: python benchmarks/kvstore_check.py --rounds 20 --keys 100000
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

TOKENS = (16_384, 131_072)
BLOCKS = (64, 128)
MOST_MS = {
    (16_384, "python"): {64: 3.0, 128: 3.0},
    (131_072, "python"): {64: 17.0, 128: 13.0},
    (131_072, "compiled"): {64: 3.0, 128: 2.0},
}
"""Median of a CHECK, by tokens, way of hashing and tokens a block."""
MOST_LOOKUP_MS = 3.0
MOST_ANONYMOUS_MB = 100.0


def main() -> None:
    """Measure, write the results, print the table."""
    args = _arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = {
        **facts("" if sys.argv[1:] else "make bench-kvstore"),
        "keys": args.keys,
        **measure(args.keys, args.rounds),
    }
    results["limits"] = judge(results)
    keep(results, args.out, "kvstore_check")
    print(table(results))
    sys.exit(any(limit["verdict"] == "not met" for limit in results["limits"]))


def measure(keys: int, rounds: int) -> dict[str, Any]:
    """Everything, with `keys` blocks in the index."""
    from kv import checks

    hashing, check = [], []
    for tokens in TOKENS:
        for block in BLOCKS:
            _say(f"hashing {tokens} tokens, {block} a block")
            times = checks.hash_times(checks.prompt(tokens), block, rounds)
            hashing.append({"tokens": tokens, "block": block, "ms": times})
    with tempfile.TemporaryDirectory(prefix="check-") as scratch:
        directory, root = Path(scratch), Path(scratch) / "root"
        root.mkdir()
        _say(f"writing journals of {keys} blocks")
        prompts = [checks.prompt(tokens) for tokens in TOKENS]
        stores = [checks.Store(root, block, prompts, keys // len(BLOCKS)) for block in BLOCKS]
        with checks.daemon(root, directory, sum(len(set(store.keys)) for store in stores)) as (socket, process):
            for tokens in prompts:
                for store in stores:
                    _say(f"asking for {len(tokens)} tokens, {store.block} a block")
                    times = checks.check_times(socket, store, tokens, rounds)
                    check.append({"tokens": len(tokens), "block": store.block, "ms": times})
            anonymous_mb = checks.anonymous_bytes(process) / 1e6
            lookup_ms = checks.lookup_times(directory / "index", stores[0], rounds)
    return {"hashing": hashing, "check": check, "lookup_ms": lookup_ms, "anonymous_mb": anonymous_mb}


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each limit: what was found, what is allowed, the verdict."""
    found = [
        (f"CHECK of {row['tokens']:,} tokens, {row['block']} a block, hashed by {way}: ms", median(times), most)
        for row in results["check"]
        for way, times in row["ms"].items()
        if (most := MOST_MS.get((row["tokens"], way), {}).get(row["block"]))
    ]
    found.append(("lookup of 1,024 blocks: ms", median(results["lookup_ms"]), MOST_LOOKUP_MS))
    found.append(("daemon's anonymous memory: MB", results["anonymous_mb"], MOST_ANONYMOUS_MB))
    return [
        {"name": name, "found": value, "at_most": most, "verdict": "met" if value <= most else "not met"}
        for name, value, most in found
    ]


def table(results: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "| hashing: tokens, block | vLLM ms | Python ms | C ms | vLLM / Python | vLLM / C |",
        "| --- |" + " --- |" * 5,
    ]
    for row in results["hashing"]:
        vllm, python, compiled = (median(row["ms"][way]) for way in ("vllm", "python", "compiled"))
        cells = (f"{vllm:.2f}", f"{python:.2f}", f"{compiled:.2f}", f"{vllm / python:.2f}", f"{vllm / compiled:.1f}")
        lines.append(f"| {row['tokens']:,}, {row['block']} | {' | '.join(cells)} |")
    lines += [
        "",
        "| CHECK: tokens, block | by Python p50, p99 ms | by C | a turn of a conversation |",
        "| --- |" + " --- |" * 3,
    ]
    for row in results["check"]:
        cells = [f"{median(row['ms'][way]):.2f}, {_p99(row['ms'][way]):.2f}" for way in ("python", "compiled", "turn")]
        lines.append(f"| {row['tokens']:,}, {row['block']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"| limit, {results['keys']:,} blocks in the index | found | at most | |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {x['name']} | {x['found']:.2f} | {x['at_most']:g} | {x['verdict']} |" for x in results["limits"]]
    return "\n".join(lines) + "\n"


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0]


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=50, help="of every measurement; default: 50")
    add("--keys", type=int, default=1_000_000, help="blocks in the index; default: 1000000")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for kvstore_check.json")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if args.keys < 20_000:
        parser.error(f"--keys {args.keys}: must be at least 20000")
    return args


if __name__ == "__main__":
    main()
