"""Where a step of the portable model goes: operations and device time by part of the model, for a decode and a prefill.

Operations are those that PyTorch dispatches: on a GPU most of them are a launch, and a decode's time is little else.
Device time is the profiler's, of everything launched inside a part; on a CPU there is none. Operations are the same.

Example: DEEPINFER_VLLM_MODEL=portable python benchmarks/gpu/profile_parts.py /tmp/wide --out profile.json
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

OUTSIDE = "the rest"


class Parts:
    """Names what runs inside which part; parts within parts are parts of their own."""

    def __init__(self, model: Any) -> None:
        self.inside = [OUTSIDE]
        for name, call in _calls(model):
            owner, method = call
            setattr(owner, method, self._named(name, getattr(owner, method)))

    def _named(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def named(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(name)
            try:
                with record_function(f"part: {name}"):
                    return call(*args, **kwargs)
            finally:
                self.inside.pop()

        return named


def _calls(model: Any) -> list[tuple[str, tuple[Any, str]]]:
    found: list[tuple[str, tuple[Any, str]]] = []
    for layer in model.layers:
        found += [("attention, rows", (layer.attn, "write")), ("attention, projections", (layer.attn, "attend"))]
        found += [("attention itself", (layer.attn, "_attended")), ("experts", (layer.ffn, "forward"))]
        found += [("hyper-connections", (each, "forward")) for each in (layer.hc_attn, layer.hc_ffn)]
        if layer.attn.role.selects:
            found.append(("indexer", (layer.attn.indexer, "forward")))
        if hasattr(layer, "engram"):
            found.append(("Engram", (layer.engram, "forward")))
    return found


class Counting(TorchDispatchMode):
    """Counts operations by the part they run in. Views launch nothing and are left out."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._parts = parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[self._parts.inside[-1]] += 1
        return func(*args, **(kwargs or {}))


def device_ms(profiler: Any) -> dict[str, float]:
    """Of each part, those within it left out."""
    spent: Counter[str] = Counter()
    for event in profiler.events():
        if event.name.startswith("part: "):
            own = event.device_time_total
            own -= sum(child.device_time_total for child in _within(event))
            spent[event.name.removeprefix("part: ")] += own / 1000
    return dict(spent)


def _within(event: Any) -> list[Any]:
    """The next parts below an event."""
    found = []
    for child in event.cpu_children:
        found += [child] if child.name.startswith("part: ") else _within(child)
    return found


def main() -> None:
    """Count and time a decode step and a prefill, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("--requests", type=int, default=16, help="that decode; default: 16")
    add("--prompt", type=int, default=1024, help="tokens of each prompt; default: 1024")
    add("--dtype", default="bfloat16", help="default: bfloat16")
    add("--kv-gb", type=float, default=8, help="KV cache, GiB; default: 8")
    add("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(args.checkpoint),
        dtype=args.dtype,
        skip_tokenizer_init=True,
        language_model_only=True,
        enforce_eager=True,
        max_model_len=args.prompt + 64,
        max_num_seqs=args.requests,
        max_num_batched_tokens=args.prompt,
        kv_cache_memory_bytes=int(args.kv_gb * 2**30),
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    parts = Parts(runner.model)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    for number in range(args.requests):
        ids = [(7 * number + place) % 300 for place in range(args.prompt)]
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    results: dict[str, Any] = {}

    def step() -> None:
        engine.step()

    step()  # what is compiled at first use
    for kind, warm in (("prefill", 1), ("decode", args.requests + 3)):
        for _ in range(warm):
            step()
        with Counting(parts) as counting:
            step()
        with profile(activities=activities) as profiler:
            step()
        results[kind] = {"operations": dict(counting.counts), "device_ms": device_ms(profiler)}
    print("| part | operations, decode | prefill | device ms, decode | prefill |\n| --- | ---: | ---: | ---: | ---: |")
    for part in sorted(results["decode"]["operations"], key=results["decode"]["operations"].get, reverse=True):
        counts = [str(results[kind]["operations"].get(part, 0)) for kind in ("decode", "prefill")]
        times = [f"{results[kind]['device_ms'].get(part, 0.0):.2f}" for kind in ("decode", "prefill")]
        print(f"| {part} | {' | '.join(counts + times)} |")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
