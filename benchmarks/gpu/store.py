"""The connector on a GPU: one engine, one part of the comparison, a JSON file of seconds and counts.

Parts, each a process: `bare` (no connector: recomputed, then from the GPU's prefix cache), `fill` and then `load` (the
store, the second in a fresh engine), `fs-fill` and `fs-load` (vLLM's own fs tier likewise). Time to first token of
prompts with `--tail` new tokens behind what is stored; time per token of `--batch` requests that decode together.

Example: for part in bare fill load; do python benchmarks/gpu/store.py $part /tmp/wide /tmp/kv /tmp/out; done
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

HOST_BYTES, STORE_BYTES = 8 << 30, 16 << 30
PARTS = ("bare", "fill", "load", "fs-fill", "fs-load")


def connector(part: str, root: Path) -> dict[str, Any] | None:
    """What `LLM` is told of the connector."""
    if part == "bare":
        return None
    if part.startswith("fs"):
        tier = {"type": "fs", "root_dir": str(root / "fs")}
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": HOST_BYTES, "secondary_tiers": [tier]}
        name = "OffloadingConnector"
    else:
        extra = {"root": str(root / "store"), "capacity_bytes": STORE_BYTES, "cpu_bytes_to_use": HOST_BYTES}
        name = "DeepInfer3FSConnector"
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def prompts(lengths: list[int], count: int, vocab: int) -> dict[int, list[list[int]]]:
    """`count` random prompts of each length, the same in every part."""
    generator = torch.Generator().manual_seed(1)
    return {
        n: [torch.randint(vocab - vocab // 16, (n,), generator=generator).tolist() for _ in range(count)]
        for n in lengths
    }


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
            max_model_len=max(args.tokens) + args.tail + 512,
            max_num_batched_tokens=8192,
            max_num_seqs=32,
            gpu_memory_utilization=0.3,  # what is free at the start, no more: there are others
            kv_cache_memory_bytes=args.kv_gb << 30,
            kv_transfer_config=connector(args.part, args.root),
            speculative_config=speculative,
            prefix_caching_hash_algo="sha256_cbor",
            disable_log_stats=False,
        )
        self.start_s = time.monotonic() - start

    def ask(self, prompts: list[list[int]], count: int) -> tuple[float, list[Any]]:
        """Seconds until all have answered with `count` tokens, and their outputs."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        found = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start, found

    def settle(self, seconds: float = 3.0) -> None:
        """Let stores finish: the engine works only when it is asked."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.ask([[5, 6, 7]], 1)
            time.sleep(0.05)

    def transfers(self) -> dict[str, float]:
        """vLLM's own counts of what went into and out of the GPU."""
        return {
            f"{m.name}{sorted(m.labels.items())}": float(getattr(m, "value", 0) or getattr(m, "sum", 0))
            for m in self.llm.get_metrics()
            if "kv_offload" in m.name or "deepinfer" in m.name
        }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything of this part."""
    engine = Engine(args)
    vocab = engine.llm.llm_engine.vllm_config.model_config.hf_config.vocab_size
    given = prompts(args.tokens, args.count + 1, vocab)
    tails = prompts([args.tail], 2 * args.count + 2, vocab)[args.tail]
    engine.ask([tails[0] * 8], 4)  # kernels
    results: dict[str, Any] = {"part": args.part, "dspark": args.dspark, "start_s": engine.start_s, "ttft": {}}
    for tokens, rows in given.items():
        engine.ask([rows[-1] + tails[-1]], 2)  # this length's kernels and shapes
        first, again, hits, answers = [], [], [], []
        for row, tail in zip(rows[: args.count], tails, strict=False):
            seconds, found = engine.ask([row + tail], 1)
            first.append(seconds)
            hits.append(found[0].num_cached_tokens)
            answers.append(list(found[0].outputs[0].token_ids))
        for row, tail in zip(rows[: args.count], tails[args.count :], strict=False):
            seconds, found = engine.ask([row + tail], 1)
            again.append(seconds)
            answers.append(list(found[0].outputs[0].token_ids))
        results["ttft"][str(tokens)] = {"first_s": first, "again_s": again, "hits": hits, "answers": answers}
        print(f"{args.part}: {tokens} tokens: {statistics.median(first):.4f} s, hits {hits}, then "
              f"{statistics.median(again):.4f} s", flush=True)  # fmt: skip
    if args.part in ("bare", "fill", "fs-fill"):
        batch = prompts([1024], args.batch, vocab)[1024]
        engine.ask(batch, 2)
        times = []
        for _ in range(args.rounds):
            short, _ = engine.ask(batch, 1)
            long, _ = engine.ask(batch, 1 + args.decode)
            times.append((long - short) / args.decode)
        results["decode_s"] = times
        print(f"{args.part}: a step of {args.batch} takes {1e3 * statistics.median(times):.3f} ms", flush=True)
    engine.settle()
    results["transfers"] = engine.transfers()
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
    add(
        "--tokens", type=int, nargs="+", default=[8192, 32768, 131072], help="stored tokens; default: 8192 32768 131072"
    )
    add("--tail", type=int, default=64, help="new tokens behind them; default: 64")
    add("--count", type=int, default=3, help="prompts of each length; default: 3")
    add("--batch", type=int, default=16, help="requests that decode together; default: 16")
    add("--decode", type=int, default=128, help="tokens that each decodes; default: 128")
    add("--rounds", type=int, default=3, help="of decoding; default: 3")
    add("--kv-gb", type=int, default=24, help="KV cache on the GPU, GiB; default: 24")
    add("--dspark", action="store_true", help="with five drafts a step")
    add("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    (args.root / "store").mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    results = measure(args)
    if args.part == "bare":
        results["pinned_gb_per_s"] = pinned_copy()
    name = args.part + ("-dspark" if args.dspark else "")
    (args.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
