"""One of the engines, in a process of its own and on one core."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from child import Child, answer

from chunks.load import LONG, SHORT, Load, prompt_lengths
from chunks.predictions import SETTLED, predictions

GRID = 4
"""Chunks are as much shorter than on an accelerator."""


class Contender(NamedTuple):
    """Who cuts the chunks."""

    name: str
    kind: str
    """"ours", "stock" or "pressure"."""
    tokens: int
    """Of a step at most, those of decodes with them."""
    cap: int = 0
    """Of a step under pressure."""
    large: int = 0
    """Tokens left from which a prefill alone is pressure; 0: it never is."""


def start(script: str, contender: Contender, checkpoint: Path, options: dict[str, Any]) -> Child:
    """options: target_s, streams, clock."""
    environment = {
        "DEEPINFER_VLLM_MODEL": "portable",
        "DEEPINFER_VLLM_DECODER_REPLAY": "0",
        "DEEPINFER_VLLM_SCHED_TARGET_MS": str(1000 * options["target_s"]),
        "DEEPINFER_VLLM_SCHED_GRID": str(GRID),
        "CHUNKING_PRESSURE_CAP": str(contender.cap),
        "CHUNKING_PRESSURE_LARGE": str(contender.large or ""),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return Child([script, "--serve", json.dumps([contender, str(checkpoint), options])], environment)


def serve(text: str) -> None:
    """In the engine's process: answer each line {"cycles", "warm", "first"} with what that load took, and "decode" with
    the seconds of a step in which only streams run."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    contender, checkpoint, options = json.loads(text)
    contender = Contender(*contender)
    clock = time.process_time if options["clock"] == "processor" else time.perf_counter
    engine = _engine(contender, checkpoint, options["streams"])
    seen = _by_clock(engine, clock) if contender.kind == "ours" else []
    load = Load(engine, options["streams"], clock)
    load.run([SHORT[0]], 0)
    answer()
    for line in sys.stdin:
        asked = json.loads(line)
        if asked == "decode":
            answer(json.dumps(load.decode_step(30)))
            continue
        load.run(prompt_lengths(asked["warm"], seed=2)[: asked["first"]], seed=2)
        measured = load.run(prompt_lengths(asked["cycles"], seed=1)[: asked["first"]], seed=1)
        settled = [abs(said / took - 1) for said, took in seen[SETTLED:]]
        answer(json.dumps({**vars(measured), "errors": settled, "steps": len(seen)}))


def _engine(contender: Contender, checkpoint: str, streams: int) -> Any:
    from vllm import LLM

    chosen: dict[str, Any] = {}
    if contender.kind == "ours":
        chosen["scheduler_cls"] = "deepinfer_vllm.scheduling.CostModelScheduler"
    elif contender.kind == "pressure":
        chosen["scheduler_cls"] = "chunks.pressure.PressureScheduler"
    return LLM(
        checkpoint,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=512 << 20,
        block_size=32,
        max_num_seqs=streams + 4,
        max_num_batched_tokens=contender.tokens,
        max_model_len=LONG + 64,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **chosen,
    ).llm_engine


def _by_clock(engine: Any, clock: Any) -> list[tuple[float, float]]:
    """The predictions; steps are measured by the load's clock."""
    from deepinfer_vllm.scheduling import scheduler

    scheduler.perf_counter = clock
    return predictions(engine)
