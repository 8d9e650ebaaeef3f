"""The trained pair on a GPU, in float32: are greedy answers with drafts those without, and what does drafting do?

Drafts of random weights all fall; those of the pair stand for a reason. Our portable model runs it, as the sizes are
not the release's.

Example: python benchmarks/gpu/pair.py /tmp/pair /tmp/out --requests 1 16
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", DEEPINFER_VLLM_MODEL="portable")

import torch


def engine(checkpoint: Path, speculative: dict[str, Any] | None, most: int) -> Any:
    """Without graphs, which our model cannot be captured in."""
    from vllm import LLM

    return LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=most,
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.2,  # there are others
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=speculative,
    )


def prompts(checkpoint: Path, count: int) -> list[list[int]]:
    """Held-out texts, kinds in turn."""
    from tokenizers import Tokenizer

    from deepinfer_vllm.training.prompts import held_out_prompts

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return [tokenizer.encode(made["prompt"]).ids for made in held_out_prompts(count, tokens=96)]


def answers(llm: Any, asked: list[list[int]], tokens: int, at_once: int) -> tuple[list[list[int]], float]:
    """Greedy, `at_once` requests after each other; and the seconds they took."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    begin, found = time.perf_counter(), []
    for first in range(0, len(asked), at_once):
        given = [{"prompt_token_ids": prompt} for prompt in asked[first : first + at_once]]
        found += [list(o.outputs[0].token_ids) for o in llm.generate(given, params, use_tqdm=False)]
    return found, time.perf_counter() - begin


def counts(llm: Any) -> dict[str, Any]:
    """The project's metrics of drafting."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if "deepinfer_dspark" in metric.name:
            position = metric.labels.get("position")
            name = metric.name.removeprefix("vllm:deepinfer_dspark_") + (f"/{position}" if position else "")
            found[name] = getattr(metric, "value", None) if hasattr(metric, "value") else [metric.count, metric.sum]
    return found


def measured(checkpoint: Path, args: argparse.Namespace, speculative: dict[str, Any] | None) -> dict[str, Any]:
    """Answers and seconds by requests at a time; and what drafting did."""
    llm, asked = engine(checkpoint, speculative, max(args.requests)), prompts(checkpoint, args.prompts)
    answers(llm, asked[: max(args.requests)], 8, max(args.requests))
    found = {}
    for requests in args.requests:
        tokens, seconds = answers(llm, asked, args.tokens, requests)
        found[str(requests)] = {"answers": tokens, "seconds": seconds}
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    decider = type(getattr(getattr(runner, "speculator", None), "decider", None)).__name__
    result = {"by requests": found, "decider": decider, "metrics": counts(llm)}
    llm.llm_engine.engine_core.shutdown()
    del llm, runner
    gc.collect()
    torch.cuda.empty_cache()
    return result


def main() -> None:
    """Compare the ways and write pair.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="where the pair is, or is written")
    parser.add_argument("out", type=Path, help="directory for pair.json and the record of drafts")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="at a time; default: 1 16")
    parser.add_argument("--prompts", type=int, default=32, help="default: 32")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer; default: 96")
    args = parser.parse_args()
    if not (args.checkpoint / "config.json").is_file():
        from deepinfer_vllm.training.shipped import write_trained

        write_trained(args.checkpoint, dtype="float32", force=True)
    args.out.mkdir(parents=True, exist_ok=True)
    drafting = {"method": "dspark", "num_speculative_tokens": 5}
    results: dict[str, Any] = {"none": measured(args.checkpoint, args, None)}
    for way in ("auto", "fixed"):
        os.environ["DEEPINFER_VLLM_DSPARK_BUDGET"] = way
        os.environ["DEEPINFER_VLLM_DSPARK_RECORD"] = str(args.out / "record.jsonl") if way == "auto" else ""
        results[way] = measured(args.checkpoint, args, drafting)
    plain = results["none"]["by requests"]
    for way, result in results.items():
        for requests, found in result["by requests"].items():
            pairs = zip(found["answers"], plain[requests]["answers"], strict=True)
            found["equal"] = f"{sum(a == b for a, b in pairs)} of {len(found['answers'])}"
            print(f"{way}, {requests} at a time: {found['seconds']:.2f} s, answers equal to none's: {found['equal']}")
        print(f"{way}: decided by {result['decider']}; {result['metrics']}", flush=True)
    for result in results.values():
        for found in result["by requests"].values():
            del found["answers"]
    (args.out / "pair.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
