"""What this machine does at best: bytes a second of a streaming read, operations a second of a matrix product."""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from typing import Any

import torch

from v41.work import Shape, attention_work, linear_shapes

COLD_BYTES = 256 << 20
"""Operands that are read once in a model are taken from a buffer larger than any cache."""


class Bandwidth:
    """Reads a buffer of the size of the active weights."""

    def __init__(self, size_bytes: int) -> None:
        self._buffer = torch.ones(size_bytes // 4, dtype=torch.float32)

    def measure(self) -> float:
        """Bytes a second, of one pass over the buffer with torch's threads."""
        start = time.perf_counter()
        self._buffer.sum()
        return self._buffer.nbytes / (time.perf_counter() - start)


def gemm_seconds(shape: Shape, dtype: torch.dtype, repeats: int) -> float:
    """Median time of x [m, k] times weight [n, k] transposed, the weight not in a cache."""
    m, n, k = shape
    x = torch.randn(m, k).to(dtype)
    count = max(2, min(64, COLD_BYTES // (n * k * dtype.itemsize)))
    weights = torch.randn(1, n, k).to(dtype).repeat(count, 1, 1)
    torch.nn.functional.linear(x, weights[0])
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weights[i % count])
        times.append(time.perf_counter() - start)
    return median(times)


def batched_rate(batch: int, m: int, n: int, k: int, dtype: torch.dtype, repeats: int) -> float:
    """Operations a second of `batch` products [m, k] x [k, n], each with operands of its own."""
    x, y = torch.randn(batch, m, k).to(dtype), torch.randn(batch, n, k).to(dtype).transpose(1, 2)
    torch.bmm(x, y)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.bmm(x, y)
        times.append(time.perf_counter() - start)
    return 2 * batch * m * n * k / median(times)


def prefill_floor(config: dict[str, Any], tokens: int, chunk: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Seconds below which a prompt cannot be prefilled, by part, from products of the same shapes measured now.

    Linears at their own shapes. The window at the rate of a block of 64 tokens over its window, selected rows at that
    of one token's heads over its rows (each token has rows of its own), index scores at that of 64 tokens' heads.
    """
    text = config["text_config"]
    shapes: Counter[Shape] = linear_shapes(config, chunk)
    measured = {shape: gemm_seconds(shape, dtype, repeats) for shape in shapes}
    steps = tokens / chunk
    linear = steps * sum(measured[shape] * count for shape, count in shapes.items())
    linear_flops = steps * sum(2 * m * n * k * count for (m, n, k), count in shapes.items())
    heads, dim = text["num_attention_heads"], text["head_dim"]
    work = attention_work(config, tokens)
    window = batched_rate(1, 64 * heads, text["sliding_window"], dim, torch.float32, repeats * 4)
    selected = batched_rate(64, heads, text["index_topk"], dim, torch.float32, repeats * 4)
    index = batched_rate(1, 64 * text["index_n_heads"], 2048, text["index_head_dim"], torch.float32, repeats * 4)
    parts = {
        "linear": linear,
        "window": work.window / window,
        "selected rows": work.selected / selected,
        "index scores": work.indexer / index,
    }
    return {
        "seconds": sum(parts.values()),
        "parts_seconds": parts,
        "flops": linear_flops + work.window + work.selected + work.indexer,
        "rates_gflops": {
            "linear": linear_flops / linear / 1e9,
            "window": window / 1e9,
            "selected rows": selected / 1e9,
            "index scores": index / 1e9,
        },
        "gemms": [
            {"shape": list(shape), "count": shapes[shape], "seconds": seconds} for shape, seconds in measured.items()
        ],
    }
