"""The connector on a GPU: one engine, one part of the comparison, a JSON file of seconds and counts.

Parts, each a process: `bare` (no connector: recomputed, then from the GPU's prefix cache), `fill`, then `load` (the
store in a fresh engine) and `faulty` (another, after bytes in every slab were changed); `fs-fill` and `fs-load` (vLLM's
own fs tier). Time to first token of prompts with `--tail` new tokens behind what is stored; time per token of `--batch`
requests that decode together while what they computed is being stored. `store_report.py` compares the parts.

Example: for part in bare fill load faulty; do python benchmarks/gpu/store.py $part /tmp/wide /tmp/kv /tmp/out; done
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

PARTS = ("bare", "fill", "load", "faulty", "fs-fill", "fs-load")
TAILS = {"bare": (0, 1), "fill": (0, 2), "load": (1, 3), "faulty": (0, 3), "fs-fill": (0, 2), "fs-load": (1, 3)}
"""Which tails a part's first and second prompts have: what is loaded from a store has been answered by `bare` after a
hit of the same length, and by nobody else; what cannot be loaded, after no hit."""
FAULTS_APART = 64 << 10
"""Bytes between two that are changed in a slab: less than a block."""


def connector(args: argparse.Namespace) -> dict[str, Any] | None:
    """What `LLM` is told of the connector."""
    if args.part == "bare":
        return None
    host = int(args.host_gb * 2**30)
    if args.part.startswith("fs"):
        tier = {"type": "fs", "root_dir": str(args.root / "fs")}
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": host, "secondary_tiers": [tier]}
        name = "OffloadingConnector"
    else:
        extra = {
            "root": str(args.root / "store"),
            "index_dir": str(args.root / "index"),
            "capacity_bytes": int(args.store_gb * 2**30),
            "slab_bytes": int(args.store_gb * 2**30) // 16,
            "cpu_bytes_to_use": host,
        }
        name = "DeepInfer3FSConnector"
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def prompts(tokens: int, count: int, vocab: int, seed: int) -> list[list[int]]:
    """`count` random prompts, the same in every part."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab - vocab // 16, (tokens,), generator=generator).tolist() for _ in range(count)]


def change_slabs(root: Path) -> int:
    """Change a byte every `FAULTS_APART` in all slab files; how many files there were."""
    files = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size >= FAULTS_APART]
    for path in files:
        with path.open("r+b") as file:
            for place in range(FAULTS_APART // 2, path.stat().st_size, FAULTS_APART):
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 255]))
    return len(files)


class Engine:
    """An engine in this process, driven one call at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        start = time.monotonic()
        speculative = {"method": "dspark", "num_speculative_tokens": 5} if args.dspark else None
        self.llm = LLM(
            str(args.checkpoint),
            dtype="bfloat16",
            enforce_eager=args.eager,
            skip_tokenizer_init=True,
            language_model_only=True,
            max_model_len=max([*args.tokens, args.prompt]) + args.tail + 512,
            max_num_batched_tokens=args.chunk,
            max_num_seqs=32,
            gpu_memory_utilization=0.3,  # what is free at the start, no more: there are others
            kv_cache_memory_bytes=int(args.kv_gb * 2**30),
            kv_transfer_config=connector(args),
            speculative_config=speculative,
            prefix_caching_hash_algo="sha256_cbor",
            disable_log_stats=False,
        )
        self.start_s = time.monotonic() - start

    def ask(self, prompt: list[int], count: int) -> tuple[float, Any]:
        """Seconds until it is answered with `count` tokens, and the output."""
        params = sampling(count)
        start = time.perf_counter()
        found = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - start, found[0]

    def decode_s(self, batch: list[list[int]], count: int) -> float:
        """Median seconds of the steps in which all of them decode; tokens of each: `count`."""
        engine, ends = self.llm.llm_engine, []
        for number, prompt in enumerate(batch):
            engine.add_request(f"{id(batch)}-{number}", {"prompt_token_ids": prompt}, sampling(count))
        while engine.has_unfinished_requests():
            made = [o.request_id for o in engine.step() if o.outputs and o.outputs[0].token_ids]
            ends.append((time.perf_counter(), len(made)))
        whole = [b[0] - a[0] for a, b in zip(ends, ends[1:], strict=False) if a[1] == b[1] == len(batch)]
        return statistics.median(whole)

    def settle(self, seconds: float) -> None:
        """Let stores finish: the engine works only when it is asked."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.ask([5, 6, 7], 1)
            time.sleep(0.05)

    def counts(self) -> dict[str, float]:
        """vLLM's own counts of what went into and out of the GPU, and the connector's.

        From where they are kept: `LLM.get_metrics` cuts every counter to a whole number, seconds as well.
        """
        from prometheus_client import REGISTRY

        return {
            f"{metric.name}{sorted(sample.labels.items())}": sample.value
            for metric in REGISTRY.collect()
            if "kv_offload" in metric.name or "deepinfer_kv" in metric.name
            for sample in metric.samples
            if sample.name.removeprefix(metric.name) in ("", "_total", "_sum")
        }


def sampling(count: int) -> Any:
    """Greedy, so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything of this part."""
    changed = change_slabs(args.root / "store") if args.part == "faulty" else 0
    engine = Engine(args)
    vocab = engine.llm.llm_engine.vllm_config.model_config.hf_config.vocab_size
    tails = prompts(args.tail, 4 * args.count + 2, vocab, seed=1)
    engine.ask(tails[-1] * 8, 4)  # kernels
    results: dict[str, Any] = {
        "part": args.part,
        "dspark": args.dspark,
        "start_s": engine.start_s,
        "changed_slabs": changed,
        "ttft": {},
    }
    for tokens in args.tokens:
        rows = prompts(tokens, args.count + 1, vocab, seed=tokens)
        engine.ask(rows[-1] + tails[-2], 2)  # this length's kernels and shapes
        found: dict[str, list[Any]] = {"tails": [], "seconds": [], "hits": [], "answers": []}
        for which in TAILS[args.part]:
            for row, tail in zip(rows, tails[which * args.count : (which + 1) * args.count], strict=False):
                seconds, output = engine.ask(row + tail, args.answer)
                found["tails"].append(which)
                found["seconds"].append(seconds)
                found["hits"].append(output.num_cached_tokens)
                found["answers"].append(list(output.outputs[0].token_ids))
        results["ttft"][str(tokens)] = found
        times = [f"{s:.4f} s after {h}" for s, h in zip(found["seconds"], found["hits"], strict=True)]
        print(f"{args.part}: {tokens} tokens: {', '.join(times)}", flush=True)
    if args.part in ("bare", "fill", "fs-fill"):
        batches = [prompts(args.prompt, args.batch, vocab, seed=100 + number) for number in range(args.rounds + 1)]
        results["decode_s"] = [engine.decode_s(batch, args.decode) for batch in batches][1:]
        print(f"{args.part}: a step of {args.batch} takes {1e3 * statistics.median(results['decode_s']):.3f} ms")
        engine.settle(args.settle)
    results["counts"] = engine.counts()
    return results


def pinned_copy() -> dict[str, float]:
    """GB/s of a plain copy of 256 MiB from and to pinned memory."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    speeds = {}
    for name, source, destination in (("in", host, device), ("out", device, host)):
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            destination.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        speeds[name] = host.nbytes / statistics.median(times) / 1e9
    return speeds


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", choices=PARTS)
    add("checkpoint", type=Path)
    add("root", type=Path, help="where the store's and the fs tier's files are")
    add("out", type=Path, help="directory for PART.json")
    lengths = [8192, 32768, 131072]
    add("--tokens", type=int, nargs="+", default=lengths, help="stored tokens; default: 8192 32768 131072")
    add("--tail", type=int, default=64, help="new tokens behind them; default: 64")
    add(
        "--answer",
        type=int,
        default=1,
        help="tokens of an answer; default: 1, or it is no time to the first",
    )
    add("--count", type=int, default=3, help="prompts of each length; default: 3")
    add("--batch", type=int, default=16, help="requests that decode together; default: 16")
    add("--prompt", type=int, default=1024, help="tokens of their prompts; default: 1024")
    add("--decode", type=int, default=128, help="tokens that each decodes; default: 128")
    add("--rounds", type=int, default=3, help="of decoding; default: 3")
    add("--chunk", type=int, default=8192, help="tokens of a step; default: 8192")
    add("--kv-gb", type=float, default=24, help="KV cache on the GPU, GiB; default: 24")
    add("--host-gb", type=float, default=8, help="host memory of the connector, GiB; default: 8")
    add("--store-gb", type=float, default=16, help="capacity of the store, GiB; default: 16")
    add("--settle", type=float, default=3.0, help="seconds that stores may take at the end; default: 3")
    add("--dspark", action="store_true", help="with five drafts a step")
    add("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    if args.part not in ("bare", "load", "faulty", "fs-load"):
        (args.root / args.part.replace("fs-fill", "fs").replace("fill", "store")).mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    results = measure(args)
    if args.part == "bare" and torch.cuda.is_available():
        results["pinned_gb_per_s"] = pinned_copy()
    name = args.part + ("-dspark" if args.dspark else "")
    (args.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
