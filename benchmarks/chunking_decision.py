"""What a step's decision costs: vLLM's scheduler and ours, in turn on the same running requests and one long prompt.

Nothing is computed: both schedule, and are told that every request got its token. Exits 1 when a must is missed.

Example: python benchmarks/chunking_decision.py --requests 512
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from facts import ROOT, facts, keep

MUST_S = 200e-6


def main() -> None:
    """Measure, write the results, print the page."""
    args = _arguments()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "scheduling")]
    from simulated_engine import make, request

    limits = {"max_num_seqs": args.requests + 8, "max_num_batched_tokens": 2 * args.requests + 2048}
    found: dict[str, list[float]] = {}
    made = {
        name: make(cost_model=name == "ours", drafts=args.drafts, blocks=60_000, **limits) for name in ("stock", "ours")
    }
    for scheduler in made.values():
        for number in range(args.requests):
            scheduler.add_request(request(f"d{number}", 32 + number % 64, 100_000))
        while scheduler.waiting or any(r.is_prefill_chunk for r in scheduler.running):
            _step(scheduler)
        scheduler.add_request(request("p", 100_000, 2))
    for turn in range(args.steps):
        for name, scheduler in made.items():
            took = _step(scheduler)
            if turn >= args.steps // 10:
                found.setdefault(name, []).append(took)
    stock_s, ours_s = median(found["stock"]), median(found["ours"])
    added_s = ours_s - stock_s
    results = {
        **facts(),
        "requests": args.requests,
        "drafts": args.drafts,
        "steps": args.steps,
        "stock_s": stock_s,
        "ours_s": ours_s,
        "added_s": added_s,
        "must_s": MUST_S,
    }
    keep(results, args.out, "chunking_decision")
    print(
        f"{args.requests} running requests, {args.drafts} drafts each: schedule() takes {1e6 * stock_s:.0f} us, ours "
        f"{1e6 * ours_s:.0f} us: {1e6 * added_s:+.0f} us, at most {1e6 * MUST_S:.0f}"
    )
    sys.exit(added_s > MUST_S)


def _step(scheduler: Any) -> float:
    """Seconds of schedule(), of the processor: what else the machine does is none of it."""
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    began = time.thread_time()
    output = scheduler.schedule()
    took = time.thread_time() - began
    names = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    sampled = [[1] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
    scheduler.get_grammar_bitmask(output)
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
        ),
    )
    if scheduler.num_spec_tokens:
        drafted = [name for name, tokens in zip(names, sampled, strict=True) if tokens]
        scheduler.update_draft_token_ids(DraftTokenIds(drafted, [[7] * scheduler.num_spec_tokens] * len(drafted)))
    return took


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--requests", type=int, default=512, help="that decode; default: 512")
    add("--drafts", type=int, default=0, help="of each; default: 0")
    add("--steps", type=int, default=300, help="of each scheduler; default: 300")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for chunking_decision.json")
    args = parser.parse_args()
    for option, value, high in (("requests", args.requests, 4096), ("steps", args.steps, 100_000)):
        if not 1 <= value <= high:
            parser.error(f"--{option} {value}: must lie in 1..{high}")
    return args


if __name__ == "__main__":
    main()
