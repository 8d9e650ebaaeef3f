"""How much memory loading takes: anonymous memory at its peak against the weights held and the size of a shard.

Writes a synthetic checkpoint in the published formats, most of it Engram tables that stay mapped (they are holes in
their files, so they take no disk), starts an engine on it in a process of its own, watches that process's RssAnon, and
compares its growth with what is held plus two shards. Exits 1 when it is more.

Example: python benchmarks/load_memory.py --out benchmarks/results/load_memory.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from facts import facts

SIZES: dict[str, dict[str, Any]] = {
    "large": {
        "hidden_size": 2048,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 96,
        "num_attention_heads": 16,
        "head_dim": 128,
        "q_lora_rank": 512,
        "o_lora_rank": 256,
        "engram_vocab_size": 1_400_000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
    },
    "small": {
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "n_routed_experts": 48,
        "engram_vocab_size": 100_000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
    },
}
SHARD_BYTES = {"large": 320 << 20, "small": 24 << 20}
KV_CACHE_BYTES = 8 << 20
SECONDS_BETWEEN_SAMPLES = 0.002


def anonymous_bytes() -> int:
    """This process's RssAnon."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1])


class Peak:
    """The most anonymous memory this process has had while it is watched."""

    def __enter__(self) -> Peak:
        self.bytes, self._stop = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_SAMPLES):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def load_and_watch(directory: Path, warm_up: Path, backend: str, dtype: str) -> dict[str, Any]:
    """In this process: load `warm_up`, which brings in all code, then `directory`; what the second one took."""
    from deepinfer_vllm.checkpoint.backends import BareBackend, EngineBackend
    from deepinfer_vllm.models.deepseek_v41 import weights

    def start(path: Path) -> BareBackend | EngineBackend:
        if backend == "bare":
            return BareBackend(path, dtype, "plain")
        sizes = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "max_model_len": 256, "max_num_batched_tokens": 256}
        return EngineBackend(path, dtype, "plain", **sizes, max_num_seqs=1)

    held = 0
    load = weights.load

    def load_and_count(model: Any, tensors: Any) -> set[str]:
        nonlocal held
        names = load(model, tensors)
        held = sum(parameter.nbytes for parameter in model.parameters())
        return names

    weights.load = load_and_count
    first = start(warm_up)
    first.generate([5, 6, 7], 2)
    first.close()
    del first
    gc.collect()
    before, began = anonymous_bytes(), time.perf_counter()
    with Peak() as peak:
        loaded = start(directory)
        seconds = time.perf_counter() - began
    after = anonymous_bytes()
    tokens = loaded.generate([5, 6, 7], 2).ids
    loaded.close()
    return {
        "held_bytes": held,
        "before_bytes": before,
        "peak_bytes": peak.bytes,
        "after_bytes": after,
        "seconds": round(seconds, 1),
        "tokens": tokens,
    }


def measure(size: str, backend: str, dtype: str, scratch: Path) -> dict[str, Any]:
    """Write the checkpoints, load them in a process of their own; every number and whether the limit holds."""
    import sparse_checkpoint

    from deepinfer_vllm.checkpoint.config import TextConfig
    from deepinfer_vllm.checkpoint.create import create

    directory, warm_up = scratch / "checkpoint", scratch / "warm-up"
    written = sparse_checkpoint.write(directory, TextConfig(**SIZES[size]).published(), SHARD_BYTES[size])
    create(warm_up, quant=True)
    on_disk = sum(512 * file.stat().st_blocks for file in directory.iterdir())
    arguments = ["--load", str(directory), "--warm-up", str(warm_up), "--backend", backend, "--dtype", dtype]
    child = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(child.stdout.splitlines()[-1])
    growth, limit = (
        result["peak_bytes"] - result["before_bytes"],
        result["held_bytes"] + 2 * written.largest_shard_bytes,
    )
    return {
        "checkpoint": {**asdict(written), "on_disk_bytes": on_disk},
        **result,
        "growth_bytes": growth,
        "limit_bytes": limit,
        "within": growth <= limit,
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="large", help="large: 20 GB, of which 3 GB are loaded; small: 1.5 GB")
    add("--backend", choices=["engine", "bare"], default="engine", help="vLLM's LLM, or the model alone")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="the model's dtype")
    add("--weights", choices=["packed", "bf16", "fp32"], default="packed", help="how they are held")
    add("--out", type=Path, help="write the numbers there, as JSON")
    add("--scratch", type=Path, help="where the checkpoint is written for the time of the run")
    add("--load", type=Path, help=argparse.SUPPRESS)
    add("--warm-up", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load_and_watch(args.load, args.warm_up, args.backend, args.dtype)))
        return 0
    if args.scratch and not args.scratch.is_dir():
        parser.error(f"--scratch {args.scratch}: no such directory")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["DEEPINFER_VLLM_WEIGHTS"] = args.weights
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        measured = measure(args.size, args.backend, args.dtype, Path(scratch))
    about = {key: getattr(args, key) for key in ("size", "backend", "dtype", "weights")}
    report = {**facts(), **about, **measured}
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0 if measured["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
