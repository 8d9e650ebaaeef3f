"""One of the engines, in a process of its own and on one core."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from child import Child, answer

DRAFTS = 5
MODES = {"none": "no drafts", "fixed": f"{DRAFTS} drafts", "auto": "budget"}
"""How an engine drafts: not at all, always and all verified, or as our budget decides."""
PREFIX = "vllm:deepinfer_dspark_"


def start(script: str, mode: str, checkpoint: Path, batch: int, tokens: int) -> Child:
    """An engine for batches of at most `batch` and texts of at most `tokens`."""
    environment = {
        "DEEPINFER_VLLM_MODEL": "portable",
        "DEEPINFER_VLLM_DSPARK_BUDGET": "auto" if mode == "auto" else "fixed",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return Child([script, "--serve", mode, str(checkpoint), str(batch), str(tokens)], environment)


def serve(mode: str, checkpoint: str, batch: int, tokens: int) -> None:
    """In the engine's process: answer each line {"prompts": token ids, "tokens": count, "batch": at a time} with
    what it took and did."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from vllm import LLM

    drafting = {} if mode == "none" else {"speculative_config": {"method": "dspark", "num_speculative_tokens": DRAFTS}}
    llm = LLM(
        checkpoint,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        block_size=32,
        max_num_seqs=batch,
        max_model_len=tokens,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **drafting,
    )
    answer()
    for line in sys.stdin:
        asked = json.loads(line)
        before, clock, processor = counts(llm), time.perf_counter(), time.process_time()
        answers = run(llm.llm_engine, asked["prompts"], asked["tokens"], asked["batch"])
        took = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}
        after = counts(llm)
        answer(
            json.dumps(
                {
                    **took,
                    "answers": answers,
                    "counts": {name: after[name] - before.get(name, 0) for name in after},
                }
            )
        )


def run(engine: Any, prompts: list[list[int]], tokens: int, batch: int) -> list[list[int]]:
    """The answers to all prompts, `batch` of them in the engine at any time while so many are left."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers: dict[int, list[int]] = {}
    waiting, running = list(range(len(prompts)))[::-1], 0
    while waiting or running:
        while waiting and running < batch:
            number, running = waiting.pop(), running + 1
            engine.add_request(str(number), {"prompt_token_ids": prompts[number]}, params)
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
                running -= 1
    return [answers[number] for number in range(len(prompts))]


def counts(llm: Any) -> dict[str, int]:
    """The engine's counters of drafting, those by position as `name/position`."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX) and type(metric).__name__ == "Counter":
            position = metric.labels.get("position")
            name = metric.name[len(PREFIX) :]
            found[name if position is None else f"{name}/{position}"] = int(metric.value)
    return found
