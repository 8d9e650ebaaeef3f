"""VLLM_BATCH_INVARIANT=1 with the portable model, on a GPU: is a request answered alike, bit for bit, in any batch?

Every request is asked alone; then all together, in small chunks, from the prefix cache, preempted again and again.
Counted are the answers whose tokens, and whose tokens and logprobs, are those of the first time: greedy ones and ones
drawn with seeds. On a GPU the mode takes one token at a time through the model; --normal is the same without the mode,
to see that there is something to find. Exits 1 when an answer of the mode moved.

Example: python benchmarks/gpu/invariance.py /tmp/pair /tmp/out --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", DEEPINFER_VLLM_MODEL="portable")

import torch

CHUNK, PREEMPT_STEPS = 16, 5
WAYS = ("alone again", "together", "together from the prefix cache", "in chunks", "preempted")

Answer = tuple[list[int], list[dict[int, float]]]
"""Tokens and logprobs."""


def engine(args: argparse.Namespace) -> Any:
    """The engine, in this process."""
    from vllm import LLM

    drafting = {"method": "dspark", "num_speculative_tokens": 5}
    return LLM(
        str(args.checkpoint),
        dtype=args.dtype,
        enforce_eager=True,  # our model cannot be captured in graphs
        max_model_len=max(args.lengths) + args.tokens + 16,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=args.kv_mb << 20,
        gpu_memory_utilization=0.2,  # there are others
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=drafting if args.drafts else None,
    )


def requests(args: argparse.Namespace, vocabulary: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Random prompts of each length; each is asked greedily, and drawn with a seed and limits."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, vocabulary - vocabulary // 16, (n,), generator=generator).tolist() for n in args.lengths
    ]
    greedy = [(prompt, {"temperature": 0}) for prompt in prompts]
    return greedy + [
        (prompt, {"temperature": 0.8, "seed": number, "top_p": 0.9 + 0.1 * (number % 2)})
        for number, prompt in enumerate(prompts)
    ]


def ask(llm: Any, asked: list[tuple[list[int], dict[str, Any]]], tokens: int, salt: str) -> list[Answer]:
    """Together; rows are shared in the prefix cache under the same salt only."""
    from vllm import SamplingParams

    fixed = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, "logprobs": 2}
    params = [SamplingParams(**fixed, **given) for _, given in asked]
    prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt, _ in asked]
    outputs = [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(o.token_ids), [{t: v.logprob for t, v in row.items()} for row in o.logprobs]) for o in outputs]


@contextmanager
def preempted(scheduler: Any, steps: int) -> Iterator[list[str]]:
    """While this lasts every running request is preempted each `steps` steps; their ids."""
    schedule, count, ids = scheduler.schedule, 0, list[str]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count % steps == 0:
            while scheduler.running:
                request = scheduler.running.pop()
                ids.append(request.request_id)
                scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.clear()
        return schedule(*args, **kwargs)

    scheduler.schedule = interrupted
    try:
        yield ids
    finally:
        scheduler.schedule = schedule


def compared(found: list[Answer], wanted: list[Answer]) -> dict[str, Any]:
    """How many are equal, and by how much logprobs of tokens before the first other one differ at most."""
    apart = 0.0
    for (tokens, rows), (others, wanted_rows) in zip(found, wanted, strict=True):
        for token, other, row, wanted_row in zip(tokens, others, rows, wanted_rows, strict=True):
            if token != other:
                break
            apart = max(apart, abs(row[token] - wanted_row[token]))
    return {
        "answers": len(found),
        "same tokens": sum(a[0] == b[0] for a, b in zip(found, wanted, strict=True)),
        "same bits": sum(a == b for a, b in zip(found, wanted, strict=True)),
        "largest difference": apart,
    }


def main() -> None:
    """Compare the ways and write invariance-*.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or where the trained pair is written")
    parser.add_argument("out", type=Path, help="directory for the numbers")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 40, 90, 150], help="default: 5 40 90 150")
    parser.add_argument("--tokens", type=int, default=12, help="of each answer; default: 12")
    parser.add_argument("--kv-mb", type=int, default=512, help="KV cache, MiB; default: 512")
    parser.add_argument("--drafts", action="store_true", help="with DSpark: greedy answers are those without")
    parser.add_argument("--normal", action="store_true", help="without the mode")
    args = parser.parse_args()
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(not args.normal))
    if not (args.checkpoint / "config.json").is_file():
        from deepinfer_vllm.training.shipped import write_trained

        write_trained(args.checkpoint, dtype="float32", force=True)
    llm = engine(args)
    from vllm.platforms import current_platform

    from deepinfer_vllm.native import invariance

    asked = requests(args, llm.llm_engine.vllm_config.model_config.get_vocab_size())
    scheduler, drawn = llm.llm_engine.engine_core.engine_core.scheduler, len(args.lengths)
    taken, whole = "drafts" if args.drafts else "no drafts", scheduler.max_num_scheduled_tokens

    def alone(salt: str) -> list[Answer]:
        return [answer for request in asked for answer in ask(llm, [request], args.tokens, salt)]

    wanted, results = alone("first"), {}
    for way in WAYS:
        begin = time.perf_counter()
        scheduler.max_num_scheduled_tokens = CHUNK if way in ("in chunks", "preempted") else whole
        if way == "alone again":
            found = alone(way)
        elif way == "preempted":
            with preempted(scheduler, PREEMPT_STEPS) as ids:
                found = ask(llm, asked, args.tokens, way)
            assert ids
        else:
            found = ask(llm, asked, args.tokens, "together" if "together" in way else way)
        seconds = time.perf_counter() - begin
        rows = {"greedy": compared(found[:drawn], wanted[:drawn]), "seeded": compared(found[drawn:], wanted[drawn:])}
        results[way] = {**rows, "seconds": round(seconds, 3)}
        said = ", ".join(f"{name}: {row['same bits']} of {row['answers']}" for name, row in rows.items())
        print(f"{args.dtype}, {taken}, {way}: same bits of {said}; {seconds:.1f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    mode = invariance.way().value or "normal"
    record = {"device": current_platform.device_type, "mode": mode, "dtype": args.dtype, "drafts": args.drafts}
    name = f"invariance-{mode}-{args.dtype}{'-drafts' if args.drafts else ''}.json"
    (args.out / name).write_text(json.dumps({**record, "ways": results}, indent=1) + "\n")
    kinds = ("greedy",) if args.drafts else ("greedy", "seeded")
    moved = [way for way, row in results.items() for kind in kinds if row[kind]["same bits"] < row[kind]["answers"]]
    sys.exit(bool(moved) and not args.normal)


if __name__ == "__main__":
    main()
