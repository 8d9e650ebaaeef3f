"""Time between two tokens, and prefill, of a real CPU engine under a mixed load: chunks by what they cost beside fixed
sizes and beside P-PAS.

Each contender has an engine in a process of its own, on one core, and the same load. Exits 1 when a must is missed.

Example: python benchmarks/chunking.py --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from facts import ROOT, facts

from deepinfer_vllm import envs

POSITIONS = 16_384
LARGEST = 2048
"""Tokens of a step, where something else limits it."""


def main() -> None:
    """Measure, write the results, print the page."""
    args = _arguments()
    if args.serve:
        from chunks.engine import serve

        serve(args.serve)
        return
    from chunks.engine import Contender, start
    from chunks.report import row, write

    contenders = [
        Contender("cost", "ours", LARGEST),
        *(Contender(f"{size} tokens", "stock", size) for size in args.sizes),
        *(Contender(f"P-PAS {cap} / {max(args.sizes)}", "pressure", max(args.sizes), cap) for cap in args.caps),
        *(Contender(f"P-PAS+ {cap} / {max(args.sizes)}", "pressure", max(args.sizes), cap, 4096) for cap in args.caps),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = _checkpoint(Path(scratch) / "tiny")
        options = {"target_s": 1.0, "streams": args.streams, "clock": args.clock}
        if args.target_ms:
            options["target_s"] = args.target_ms / 1000
        else:
            engine = start(__file__, Contender("", "stock", LARGEST), checkpoint, options)
            try:
                engine.ready()
                options["target_s"] = round(args.times * float(json.loads(engine.ask('"decode"'))), 3)
            finally:
                engine.close()
        _say(f"target {1000 * options['target_s']:.0f} ms")
        rows = []
        for contender in contenders:
            engine = start(__file__, contender, checkpoint, options)
            try:
                engine.ready()
                asked = {
                    "cycles": args.cycles,
                    "warm": args.warm if contender.kind == "ours" else 0,
                    "first": 4 if args.quick else None,
                }
                rows.append(row(contender.name, contender.kind, json.loads(engine.ask(json.dumps(asked)))))
            finally:
                engine.close()
            last = rows[-1]
            _say(
                f"{contender.name}: p99 {1000 * last['p99_s']:.0f} ms, {last['prefill_tokens_per_second']:.0f} "
                f"tokens/s, {last['seconds']:.0f} s, error {last['error']}"
            )
    results = {
        **facts("" if sys.argv[1:] else "make bench-chunking"),
        **options,
        "times": args.times,
        "cycles": args.cycles,
        "warm": args.warm,
        "least_share": envs.DEEPINFER_VLLM_SCHED_PREFILL_SHARE if args.tight else None,
        "results": rows,
    }
    page = write(results, args.out, "-".join(["chunking", *["tight"] * args.tight, *["quick"] * args.quick]))
    print(page.read_text())
    sys.exit(any(limit["verdict"] == "missed" for limit in results["limits"]))


def _checkpoint(directory: Path) -> Path:
    from deepinfer_vllm.checkpoint.config import TextConfig
    from deepinfer_vllm.checkpoint.writer import write_checkpoint

    write_checkpoint(directory, TextConfig(max_position_embeddings=POSITIONS).published("float32"), seed=0, shards=1)
    return directory


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="few contenders and four prompts each; for a look, not for a record")
    add("--tight", action="store_true", help="a target that leaves prompts too little: 2.2 steps of decodes")
    add("--cycles", type=int, default=1, help="of 20 prompts, some 27,000 tokens; default: 1")
    add("--warm", type=int, default=1, help="cycles before these, for the scheduler that learns; default: 1")
    add("--streams", type=int, default=12, help="requests that decode all the time; default: 12")
    add("--sizes", type=int, nargs="+", help="fixed sizes, in tokens of a step; default: 24 32 40 48 64 256")
    add("--caps", type=int, nargs="+", help="of P-PAS under pressure; default: 40")
    add("--times", type=float, help="the target, in steps of decodes alone; default: 4")
    add("--target-ms", type=float, help="the target itself")
    add("--clock", choices=("wall", "processor"), default="wall", help="processor: for a machine with other work")
    add(
        "--out",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="for chunking.json, .md and .svg, or chunking-tight",
    )
    add("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    usual = ([40], [40]) if args.quick else ([24, 32, 40, 48, 64, 256], [40])
    for option, value in zip(("sizes", "caps"), usual, strict=True):
        if getattr(args, option) is None:
            setattr(args, option, value)
    if args.times is None:
        args.times = 2.2 if args.tight else 4.0
    least = args.streams + 4
    for option, value, low, high in (
        ("cycles", args.cycles, 1, 1000),
        ("warm", args.warm, 0, 1000),
        ("streams", args.streams, 1, 256),
        *(("sizes", size, least, LARGEST) for size in args.sizes),
        *(("caps", cap, least, LARGEST) for cap in args.caps),
    ):
        if not low <= value <= high:
            parser.error(f"--{option} {value}: must lie in {low}..{high}")
    return args


if __name__ == "__main__":
    main()
