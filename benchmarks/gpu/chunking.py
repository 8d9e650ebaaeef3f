"""Chunks by cost on a GPU: one engine, one way to cut prompts, waits between two tokens under a mixed load.

Ways, each a process: `cost`, this project's scheduler with a target; or a number of tokens, vLLM's own scheduler with
that --max-num-batched-tokens. `--streams` requests decode all the time while prompts of 256 to 10,240 tokens come by
ones and by threes, as in benchmarks/chunking.py.

Example: for way in cost 512 2048 8192; do python benchmarks/gpu/chunking.py $way /tmp/wide /tmp/out; done
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chunks.load import LONG, Load, Measured, prompt_lengths
from chunks.predictions import SETTLED, predictions

LARGEST = 32768
"""Tokens of a step where cost limits it."""


def engine(args: argparse.Namespace) -> Any:
    """The engine of that way."""
    from vllm import LLM

    ours = args.way == "cost"
    chosen = {"scheduler_cls": "deepinfer_vllm.scheduling.CostModelScheduler"} if ours else {}
    return LLM(
        str(args.checkpoint),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        language_model_only=True,
        enforce_eager=args.eager,
        max_model_len=LONG + 64,
        max_num_seqs=args.streams + 4,
        max_num_batched_tokens=LARGEST if ours else int(args.way),
        kv_cache_memory_bytes=int(args.kv_gb * 2**30),
        enable_prefix_caching=False,
        **chosen,
    ).llm_engine


def told(measured: Measured) -> dict[str, Any]:
    """What is kept of a load."""
    waits = sorted(measured.intervals)
    return {
        "seconds": measured.seconds,
        "prefill_tokens_per_s": measured.prompt_tokens / measured.seconds,
        "tokens_that_waited": len(waits),
        **{f"p{part}_ms": 1e3 * waits[min(len(waits) - 1, len(waits) * part // 100)] for part in (50, 90, 99)},
    }


def main() -> None:
    """Measure one way and write chunking-WAY.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("way", help="cost, or tokens of a step")
    add("checkpoint", type=Path)
    add("out", type=Path, help="directory for chunking-WAY.json")
    add("--target-ms", type=float, default=50.0, help="of `cost`; default: 50")
    add("--streams", type=int, default=64, help="requests that decode all the time; default: 64")
    add("--cycles", type=int, default=2, help="of 20 prompts, some 27,000 tokens; as many before; default: 2")
    add("--first", type=int, help="only so many prompts of the load; for a trial")
    add("--kv-gb", type=float, default=24, help="KV cache on the GPU, GiB; default: 24")
    add("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    if args.way != "cost" and not (args.way.isdecimal() and args.streams + 4 <= int(args.way) <= LARGEST):
        parser.error(f"{args.way}: must be cost, or lie in {args.streams + 4}..{LARGEST}")
    args.out.mkdir(parents=True, exist_ok=True)
    learnt = args.out / "chunking-costs.json"
    learnt.unlink(missing_ok=True)
    os.environ |= {
        "DEEPINFER_VLLM_SCHED_TARGET_MS": str(args.target_ms),
        "DEEPINFER_VLLM_SCHED_COSTS": str(learnt),
    }
    start = time.monotonic()
    made = engine(args)
    results: dict[str, Any] = {"way": args.way, "start_s": time.monotonic() - start, "target_ms": args.target_ms}
    seen = predictions(made) if args.way == "cost" else []
    load = Load(made, args.streams)
    results["decode_step_ms"] = 1e3 * load.decode_step(30)
    load.run(prompt_lengths(args.cycles, seed=2)[: args.first], seed=2)
    known = len(seen)
    results |= told(load.run(prompt_lengths(args.cycles, seed=1)[: args.first], seed=1))
    errors = [abs(said / took - 1) for said, took in seen[max(known, SETTLED) :]]
    if errors:
        results["error"] = {"median": statistics.median(errors), "steps": len(errors)}
    if learnt.is_file():
        results["costs"] = json.loads(learnt.read_text())
    print(f"{args.way}: {json.dumps({n: v for n, v in results.items() if n != 'costs'})}", flush=True)
    (args.out / f"chunking-{args.way}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
