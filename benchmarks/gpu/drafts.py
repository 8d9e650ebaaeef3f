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
        before, rounds = counts(llm), []
        for _ in range(args.rounds):
            clock.clear()
            run(requests, args.tokens)
            rounds.append(clock.read(requests, args.tokens))
        after = counts(llm)
        results["requests"][str(requests)] = {
            "rounds": rounds,
            "counts": {name: after[name] - before.get(name, 0) for name in after},
        }
        speeds = [round_["tokens_per_s"] for round_ in rounds]
        print(f"{args.way}: {requests} requests: {statistics.median(speeds):.0f} tokens/s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"drafts-{args.way}.json").write_text(json.dumps(results, indent=1) + "\n")


def counts(llm: Any) -> dict[str, float]:
    """What vLLM and this project count of drafts."""
    kept = ("spec_decode", "deepinfer_dspark")
    found = {}
    for metric in llm.get_metrics():
        if type(metric).__name__ == "Counter" and any(part in metric.name for part in kept):
            position = metric.labels.get("position")
            found[metric.name + (f"/{position}" if position else "")] = float(metric.value)
    return found


class Clock:
    """Steps of an engine in this process in which every request decodes, and the host's time for deciding."""

    def __init__(self, llm: Any) -> None:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.clear()
        prepare = runner.prepare_inputs

        def counted(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            decode = not bool(batch.is_prefilling_np.any())
            self.steps.append((time.perf_counter(), batch.num_reqs, batch.num_tokens, decode, self.before, self.after))
            self.before = self.after = 0.0
            return batch

        runner.prepare_inputs = counted
        verifier = runner.adaptive_verification
        for name in ("began", "get_num_tokens", "verified", "wants_drafts", "drafted", "record_confidences"):
            if hasattr(verifier, name):
                setattr(verifier, name, self._timed(getattr(verifier, name), name in ("began", "get_num_tokens")))

    def _timed(self, call: Any, ahead: bool) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                if ahead:
                    self.before += time.perf_counter() - begin
                else:
                    self.after += time.perf_counter() - begin

        return timed

    def clear(self) -> None:
        """Forget what was counted."""
        self.steps: list[tuple[float, int, int, bool, float, float]] = []
        self.before = self.after = 0.0

    def read(self, requests: int, tokens: int) -> dict[str, float]:
        """Of the steps since, in which so many requests have each decoded `tokens`, the first of them in a prefill."""
        decoded = [step for step in self.steps if step[3]]
        taken = sum(step[1] for step in decoded)
        whole = [
            (after[0] - step[0], step)
            for step, after in zip(self.steps, self.steps[1:], strict=False)
            if step[3] and after[3] and step[1] == requests
        ]
        seconds = statistics.fmean(lasted for lasted, _ in whole)
        length = requests * (tokens - 1) / taken
        return {
            "steps": len(whole),
            "step_ms": 1e3 * seconds,
            "accepted_length": length,
            "verified": sum(step[2] - step[1] for step in decoded) / taken,
            "tokens_per_s": requests * length / seconds,
            "deciding_us": statistics.median(1e6 * step[4] for _, step in whole),
            "learning_us": statistics.median(1e6 * step[5] for _, step in whole),
        }


if __name__ == "__main__":
    main()
