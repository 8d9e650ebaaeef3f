"""Our Triton kernels beside the PyTorch code they stand for, on the same tensors: microseconds, and what memory allows.

Attention: the release's 64 heads of 512 channels over 128 rows of a window and 512 selected ones, each token's own.
Mixing weights: four streams of 5,120 channels, 20 Sinkhorn rounds, from their projection on. Times are medians of runs
between two events of the device's queue, after warm-up; with --graph of a captured graph's replays, which leaves the
host's launches out.

Example: python benchmarks/gpu/kernels.py --out kernels.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HEADS, DIM, WINDOW, SELECTED = 64, 512, 128, 512
STREAMS, WIDTH, ROUNDS = 4, 4 * 5120, 20


class Clock:
    """Runs something on a device, again and again."""

    def __init__(self, device: torch.device, runs: int, *, graph: bool) -> None:
        self._device, self._runs, self._graph = device, runs, graph

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median seconds of one run."""
        for _ in range(3):
            call()
        if self._device.type == "cpu":
            return statistics.median(self._spent(call) for _ in range(self._runs))
        if self._graph:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            call = graph.replay
        times = []
        for _ in range(self._runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return statistics.median(times)

    def _spent(self, call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


def copied_bytes_per_second(clock: Clock, device: torch.device) -> float:
    """What memory gives and takes when a large tensor is copied: reads and writes together."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.seconds(lambda: target.copy_(source))


def attention(tokens: int, args: argparse.Namespace, device: torch.device, clock: Clock) -> dict[str, Any]:
    """Both ways over the same cached rows, in which every token has places of its own."""
    from deepinfer_vllm.models.deepseek_v41.gather_attention import gather_attention, tokens_per_chunk

    drawn = torch.Generator().manual_seed(tokens)
    dtype, heads, dim = getattr(torch, args.dtype), args.heads, args.dim

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.randn(tokens * count, dim, generator=drawn).to(device, dtype)
        return cache, torch.randperm(tokens * count, generator=drawn).view(tokens, count).to(device)

    query = torch.randn(tokens, heads, dim, generator=drawn).to(device, dtype)
    sink = torch.randn(heads, generator=drawn).to(device)
    parts = [rows(args.window), rows(args.selected)]

    def gathered() -> torch.Tensor:
        out = torch.empty(query.shape, dtype=torch.float32, device=device)
        chunk = tokens_per_chunk(args.window + args.selected, heads, dim)
        for low in range(0, tokens, chunk):
            part = slice(low, low + chunk)
            own = torch.cat(
                [cache.index_select(0, s[part].flatten()).view(*s[part].shape, dim) for cache, s in parts], 1
            )
            valid = torch.ones(own.shape[:2], dtype=torch.bool, device=device)
            out[part] = gather_attention(query[part], own, valid, sink, dim**-0.5)
        return out

    found = {"torch_s": clock.seconds(gathered), "rows_bytes": sum(cache.nbytes for cache, _ in parts)}
    if args.kernels:
        from deepinfer_vllm.triton_kernels.attention import attention as fused

        given: dict[str, Any] = {"block_heads": args.block_heads}
        if device.type != "cuda":
            given["product"] = _float32()

        def in_place() -> torch.Tensor:
            return fused(query, parts[0], parts[1], sink, dim**-0.5, **given)

        found["triton_s"] = clock.seconds(in_place)
        found["error"] = _error(in_place(), gathered())
    return found


def gates(tokens: int, args: argparse.Namespace, device: torch.device, clock: Clock) -> dict[str, Any]:
    """Both ways from the same projection."""
    from deepinfer_vllm.models.deepseek_v41.mhc import mixed

    drawn = torch.Generator().manual_seed(tokens)
    outputs = (2 + STREAMS) * STREAMS
    base, scale = (torch.randn(size, generator=drawn).to(device) for size in (outputs, 3))
    mixes = (torch.randn(tokens, outputs, generator=drawn) * WIDTH**0.5).to(device)
    norm = torch.full((tokens, 1), WIDTH**0.5, device=device)

    def plain() -> tuple[torch.Tensor, ...]:
        return mixed(mixes, norm, base, scale, STREAMS, WIDTH, ROUNDS, 1e-6, 1e-6)

    found: dict[str, Any] = {"torch_s": clock.seconds(plain)}
    if args.kernels:
        from deepinfer_vllm.triton_kernels.gates import gates as fused

        sizes = {"streams": STREAMS, "width": WIDTH, "iterations": ROUNDS, "eps": 1e-6, "norm_eps": 1e-6}

        def once() -> tuple[torch.Tensor, ...]:
            return fused(mixes, norm, base, scale, **sizes)

        found["triton_s"] = clock.seconds(once)
        found["error"] = max(_error(a, b) for a, b in zip(once(), plain(), strict=True))
    return found


def _float32() -> Any:
    """What Triton's interpreter can multiply."""
    import triton.language as tl

    return tl.float32


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    """Measure each size, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda", help="default: cuda; on cpu kernels run in Triton's interpreter, as a trial")
    add("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024], help="default: 1 16 64 256 1024")
    add("--runs", type=int, default=50, help="default: 50")
    add("--heads", type=int, default=HEADS, help=f"default: {HEADS}")
    add("--dim", type=int, default=DIM, help=f"default: {DIM}")
    add("--window", type=int, default=WINDOW, help=f"rows; default: {WINDOW}")
    add("--selected", type=int, default=SELECTED, help=f"rows; default: {SELECTED}")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    add("--graph", action="store_true", help="replay captured graphs")
    add("--block-heads", type=int, default=16, help="of a program of attention: 16 or 64; default: 16")
    add("--no-kernels", dest="kernels", action="store_false", help="PyTorch alone, for a host without Triton")
    add("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    clock = Clock(device, args.runs, graph=args.graph)
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "copy_bytes_per_s": copied_bytes_per_second(clock, device),
    }
    print("| operation | tokens | torch, us | Triton, us | ratio | of the memory bound | error |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, measure in (("attention", attention), ("gates", gates)):
        for tokens in args.tokens:
            with torch.inference_mode():
                found = measure(tokens, args, device, clock)
            results.setdefault(name, {})[str(tokens)] = found
            took = found.get("triton_s", found["torch_s"])
            if "rows_bytes" in found:
                found["of_the_bound"] = found["rows_bytes"] / results["copy_bytes_per_s"] / took
            bound, error = found.get("of_the_bound"), found.get("error")
            cells = [f"{1e6 * found['torch_s']:.1f}", f"{1e6 * took:.1f}", f"{found['torch_s'] / took:.1f}"]
            cells += ["" if bound is None else f"{bound:.2f}", "" if error is None else f"{error:.1e}"]
            print(f"| {name} | {tokens} | {' | '.join(cells)} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
