"""DSpark on a GPU: one engine, one way to choose drafts, tokens per second by the number of requests.

Ways, each a process: `none`; `fixed`, every draft verified; `upstream`, vLLM's adaptive verification; `ours`, the same
manager with this project's costs, rule and calibration.

Example: for way in none fixed upstream ours; do python benchmarks/gpu/drafts.py $way /tmp/wide /tmp/out; done
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch

WAYS = ("none", "fixed", "upstream", "ours")
GRAPHS = [1, 2, 4, 8, 16, 32, 60, 64, 96, 128, 192, 256, 360, 480, 576, 768, 1152]
"""Sizes of captured graphs: of the numbers of requests, alone and with all drafts, and some between."""


def engine(args: argparse.Namespace) -> Any:
    """The engine of that way."""
    from vllm import LLM

    speculative = None
    if args.way != "none":
        adaptive = args.way in ("upstream", "ours")
        speculative = {"method": "dspark", "num_speculative_tokens": 5, "enable_adaptive_verification": adaptive}
    return LLM(
        str(args.checkpoint),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        language_model_only=True,
        max_model_len=args.context + args.tokens + 64,
        max_num_batched_tokens=8192,
        max_num_seqs=max(args.requests),
        kv_cache_memory_bytes=args.kv_gb << 30,
        speculative_config=speculative,
        compilation_config={"cudagraph_capture_sizes": GRAPHS},
        enable_prefix_caching=True,
        disable_log_stats=False,
    )


def main() -> None:
    """Measure one way and write WAY.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="directory for drafts-WAY.json")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 60, 96, 192], help="default: 16 60 96 192")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt; default: 1024")
    parser.add_argument("--tokens", type=int, default=256, help="that each request decodes; default: 256")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--kv-gb", type=int, default=24, help="KV cache on the GPU, GiB; default: 24")
    args = parser.parse_args()
    if args.way in ("fixed", "upstream"):
        os.environ["DEEPINFER_VLLM_DSPARK_BUDGET"] = "fixed"
    from vllm import SamplingParams

    start = time.monotonic()
    llm = engine(args)
    results: dict[str, Any] = {"way": args.way, "start_s": time.monotonic() - start, "requests": {}}
    vocab = llm.llm_engine.vllm_config.model_config.hf_config.vocab_size
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(vocab - vocab // 16, (max(args.requests), args.context), generator=generator).tolist()

    def run(requests: int, tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts[:requests]], params, use_tqdm=False)
        return time.perf_counter() - begin

    for requests in args.requests:
        run(requests, 8)  # its prompts are in the prefix cache from here on
        before = counts(llm)
        speeds = [
            requests * (args.tokens - 1) / (run(requests, args.tokens) - run(requests, 1)) for _ in range(args.rounds)
        ]
        after = counts(llm)
        results["requests"][str(requests)] = {
            "tokens_per_s": speeds,
            "counts": {name: after[name] - before.get(name, 0) for name in after},
        }
        print(f"{args.way}: {requests} requests: {statistics.median(speeds):.0f} tokens/s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"drafts-{args.way}.json").write_text(json.dumps(results, indent=1) + "\n")


def counts(llm: Any) -> dict[str, float]:
    """What vLLM and this project count of drafts."""
    kept = ("spec_decode", "deepinfer_dspark")
    return {m.name: float(m.value) for m in llm.get_metrics() if hasattr(m, "value") and any(k in m.name for k in kept)}


if __name__ == "__main__":
    main()
