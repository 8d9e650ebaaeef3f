"""What store.py's parts say together: times to the first token, whether answers agree, GB/s, and decoding beside it.

A hit in the store is compared with `bare`'s hit of the same length in the GPU's own cache: with decoder-side replay a
hit differs from a prompt computed whole, and so may its answer. Of damaged slabs nothing is found, and its answers are
compared with those of prompts computed whole.

Example: python benchmarks/gpu/store_report.py /tmp/out --out store.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

PARTS = ("bare", "fill", "load", "faulty", "fs-fill", "fs-load")
Found = dict[str, Any]


def of_tails(rows: Found, which: int) -> Found:
    """One of the two stretches of a length's prompts."""
    kept = [index for index, tail in enumerate(rows["tails"]) if tail == which]
    return {name: [rows[name][index] for index in kept] for name in ("seconds", "hits", "answers")}


def first_tokens(parts: dict[str, Found]) -> dict[str, Found]:
    """By length: median seconds of each way, hits, and how many answers are `bare`'s of the same prompts."""
    ways = {
        "recomputed": ("bare", 0),
        "GPU hit": ("bare", 1),
        "recomputed and stored": ("fill", 0),
        "store hit": ("load", 1),
        "store hit, damaged": ("faulty", 0),
        "fs tier hit": ("fs-load", 1),
    }
    table: dict[str, Found] = {}
    for tokens in parts["bare"]["ttft"]:
        for way, (part, which) in ways.items():
            if part not in parts or tokens not in parts[part]["ttft"]:
                continue
            found = of_tails(parts[part]["ttft"][tokens], which)
            row = {"seconds": statistics.median(found["seconds"]), "hits": found["hits"]}
            if part != "bare":
                wanted = of_tails(parts["bare"]["ttft"][tokens], which)
                row["same hits"] = found["hits"] == wanted["hits"]
                row["same answers"] = sum(a == b for a, b in zip(found["answers"], wanted["answers"], strict=True))
                row["of"] = len(wanted["answers"])
            table.setdefault(tokens, {})[way] = row
    return table


def speeds(part: Found) -> dict[str, float]:
    """GB/s by what vLLM counts of copies between GPU and host, and by what tiers count below."""
    totals: dict[str, float] = {}
    for name, value in part["counts"].items():
        bare = name.partition("[")[0].removesuffix("_total")
        totals[bare] = totals.get(bare, 0.0) + value
    pairs = {
        "GPU in": ("vllm:kv_offload_load_bytes", "vllm:kv_offload_load_time"),
        "GPU out": ("vllm:kv_offload_store_bytes", "vllm:kv_offload_store_time"),
        "tier read": ("vllm:kv_offload_tiering_read_bytes", "vllm:kv_offload_tiering_read_time"),
        "store read, a thread": ("vllm:deepinfer_kv_load_bytes", "vllm:deepinfer_kv_load_seconds"),
    }
    return {
        name: totals[size] / totals[seconds] / 1e9
        for name, (size, seconds) in pairs.items()
        if totals.get(size) and totals.get(seconds)
    }


def main() -> None:
    """Print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, help="directory of PART.json files")
    parser.add_argument("--suffix", default="", help="of the files' names: -dspark")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    files = {part: args.parts / f"{part}{args.suffix}.json" for part in PARTS}
    parts = {part: json.loads(file.read_text()) for part, file in files.items() if file.is_file()}
    if "bare" not in parts:
        sys.exit(f"store_report.py: no {files['bare']}: everything is compared with it. Run store.py bare first")
    results: Found = {"ttft": first_tokens(parts), "gb_per_s": {n: s for n, p in parts.items() if (s := speeds(p))}}
    results["pinned_gb_per_s"] = parts["bare"].get("pinned_gb_per_s")
    print("| tokens | way | ms | of recomputed | of the GPU hit | tokens found | answers as without a store |")
    print("| ---: | --- | ---: | ---: | ---: | --- | --- |")
    for tokens, ways in results["ttft"].items():
        for way, row in ways.items():
            of = [f"{row['seconds'] / ways[base]['seconds']:.2f}" for base in ("recomputed", "GPU hit")]
            same = f"{row['same answers']} of {row['of']}" if "of" in row else ""
            hits = ", ".join(map(str, row["hits"])) + ("" if row.get("same hits", True) else " (others)")
            print(f"| {tokens} | {way} | {1e3 * row['seconds']:.1f} | {of[0]} | {of[1]} | {hits} | {same} |")
    for name, found in results["gb_per_s"].items():
        print(f"{name}: {', '.join(f'{what} {speed:.2f} GB/s' for what, speed in found.items())}")
    if results["pinned_gb_per_s"]:
        print(f"plain pinned copies: {results['pinned_gb_per_s']}")
    steps = {name: statistics.median(part["decode_s"]) for name, part in parts.items() if "decode_s" in part}
    results["decode_s"] = steps
    for name, seconds in steps.items():
        print(f"{name}: a step takes {1e3 * seconds:.3f} ms, {seconds / steps['bare']:.3f} of bare's")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
