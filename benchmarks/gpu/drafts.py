"""DSpark on a GPU: one engine, one way to choose drafts, tokens per second by the number of requests.

Ways, each a process: `none`; `fixed`, all drafts verified; `upstream`, vLLM's adaptive verification; `graphs`, the same
manager with this project's costs, rule and calibration; `ours`, method dspark alone, without any other option.

Drafts of random weights all fall. vLLM's synthetic rejection lets them stand as often as is asked: by position alone,
so there is nothing in a draft's confidence, and a budget can only choose how many of each request it verifies.

Example: for way in none fixed upstream graphs ours; do python benchmarks/gpu/drafts.py $way /tmp/wide /tmp/out; done
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

WAYS = ("none", "fixed", "upstream", "graphs", "ours")
RATES = [0.81, 0.62, 0.43, 0.28, 0.15]
"""Of drafts that stand, by position: accepted length 3.29, as DeepSeek publishes it."""
GRAPHS = [1, 2, 4, 8, 16, 32, 60, 64, 96, 128, 192, 256, 360, 480, 576, 768, 1152]
"""Sizes of captured graphs: of the numbers of requests, alone and with all drafts, and some between."""


def engine(args: argparse.Namespace) -> Any:
    """The engine of that way."""
    from vllm import LLM

    speculative = None
    if args.way != "none":
        speculative = {"method": "dspark", "num_speculative_tokens": 5}
        if args.way in ("upstream", "graphs"):
            speculative["enable_adaptive_verification"] = True
        if args.rates:
            speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": args.rates}
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
        enforce_eager=args.eager,
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
    parser.add_argument(
        "--rates", type=float, nargs="*", default=RATES, help=f"synthetic; default: {RATES}; none: real"
    )
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
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

    clock = Clock(llm)
    for requests in args.requests:
        run(requests, args.tokens)  # its prompts are in the prefix cache from here on, and costs are learnt
        before, speeds, steps = counts(llm), [], []
        for _ in range(args.rounds):
            first = run(requests, 1)
            clock.clear()
            seconds = run(requests, args.tokens) - first
            speeds.append(requests * (args.tokens - 1) / seconds)
            steps.append(clock.read())
        after = counts(llm)
        results["requests"][str(requests)] = {
            "tokens_per_s": speeds,
            "steps": steps,
            "counts": {name: after[name] - before.get(name, 0) for name in after},
        }
        print(f"{args.way}: {requests} requests: {statistics.median(speeds):.0f} tokens/s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"drafts-{args.way}.json").write_text(json.dumps(results, indent=1) + "\n")


def counts(llm: Any) -> dict[str, float]:
    """What vLLM and this project count of drafts."""
    kept = ("spec_decode", "deepinfer_dspark")
    return {m.name: float(m.value) for m in llm.get_metrics() if hasattr(m, "value") and any(k in m.name for k in kept)}


class Clock:
    """Steps of an engine in this process: how many, the tokens they computed, and the host's time for deciding."""

    def __init__(self, llm: Any) -> None:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.clear()
        prepare = runner.prepare_inputs

        def counted(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            self.steps.append((batch.num_reqs, batch.num_tokens, self.deciding))
            self.deciding = 0.0
            return batch

        runner.prepare_inputs = counted
        verifier = runner.adaptive_verification
        for name in ("began", "get_num_tokens", "verified", "wants_drafts", "drafted", "record_confidences"):
            if hasattr(verifier, name):
                setattr(verifier, name, self._timed(getattr(verifier, name)))

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.deciding += time.perf_counter() - begin

        return timed

    def clear(self) -> None:
        """Forget what was counted."""
        self.steps: list[tuple[int, int, float]] = []
        self.deciding = 0.0

    def read(self) -> dict[str, float]:
        """Of the steps since: their number, tokens a request computed, and microseconds of deciding."""
        deciding = sorted(1e6 * seconds for _, _, seconds in self.steps)
        return {
            "steps": len(self.steps),
            "tokens a request": sum(tokens for _, tokens, _ in self.steps)
            / sum(requests for requests, _, _ in self.steps),
            "deciding_us": statistics.median(deciding),
            "deciding_us_p90": deciding[int(0.9 * len(deciding))],
        }


if __name__ == "__main__":
    main()
