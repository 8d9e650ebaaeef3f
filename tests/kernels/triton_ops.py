"""`python -m kernels.triton_ops FILE`: our Triton kernels on every case, in Triton's interpreter.

A process of its own, because Triton decides as it is imported. Its products read bfloat16 as integers, so all are of
float32 here; what is loaded is of any type.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

WIDTHS = [(3, 8), (16, 16), (20, 24), (64, 512)]
"""Heads and channels: fewer than a block, one, more, the release's."""
ROWS = [(11, 0), (7, 5), (40, 70), (1, 33)]
"""Rows of the window and selected ones that a token may see."""
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = 5
SOME = "20x24 40+70 torch.float32"
STREAMS = [(1, 1), (2, 3), (3, 20), (4, 20)]
"""Streams and Sinkhorn rounds."""


def attention_cases() -> dict[str, dict[str, Any]]:
    """Arguments by name; caches hold NaN where no token looks, and lie in wider rows."""
    cases = {}
    for (heads, dim), (window, selected), dtype in [
        *((w, r, DTYPES[at % 2]) for at, (w, r) in enumerate(product(WIDTHS[:3], ROWS))),
        (WIDTHS[3], ROWS[2], torch.bfloat16),
    ]:
        drawn = torch.Generator().manual_seed(heads * dim + window)
        cases[f"{heads}x{dim} {window}+{selected} {dtype}"] = {
            "query": torch.randn(TOKENS, heads, dim, generator=drawn).to(dtype),
            "window": _rows(window, dim, dtype, drawn),
            "selected": _rows(selected, dim, dtype, drawn) if selected else None,
            "sink": torch.randn(heads, generator=drawn),
            "scale": dim**-0.5,
        }
    return cases


def _rows(count: int, dim: int, dtype: torch.dtype, drawn: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    cache = torch.full((3 * count + 9, dim + 3), torch.nan, dtype=dtype)
    slots = torch.stack([torch.randperm(len(cache), generator=drawn)[:count] for _ in range(TOKENS)])
    slots[torch.rand(slots.shape, generator=drawn) < 0.3] = -1
    slots[0] = -1  # sees nothing
    used = slots[slots >= 0]
    cache[used, :dim] = torch.randn(len(used), dim, generator=drawn).to(dtype)
    return cache[:, :dim], slots


def gate_cases() -> dict[str, dict[str, Any]]:
    """Arguments by name, of one token, of a block of them, and of more."""
    cases = {}
    for streams, iterations in STREAMS:
        for tokens in (1, 37):
            drawn = torch.Generator().manual_seed(streams + tokens)
            outputs = (2 + streams) * streams
            cases[f"{streams} streams, {iterations} rounds, {tokens} tokens"] = {
                "mixes": torch.randn(tokens, outputs, generator=drawn) * 30,
                "norm": torch.rand(tokens, 1, generator=drawn) * 9,
                "base": torch.randn(outputs, generator=drawn),
                "scale": torch.rand(3, generator=drawn),
                "streams": streams,
                "width": 32 * streams,
                "iterations": iterations,
                "eps": 1e-3,
                "norm_eps": 1e-6,
            }
    return cases


def model_outputs(directory: Path, kernels: str) -> dict[str, torch.Tensor]:
    """Of a checkpoint whose layers are built with these kernels: a prompt in two chunks, and what follows greedily."""
    import vllm.triton_utils

    from deepinfer_vllm.checkpoint.bare import BareModel

    vllm.triton_utils.HAS_TRITON = True  # as far as the interpreter goes
    os.environ["DEEPINFER_VLLM_KERNELS"] = kernels
    model = BareModel(directory, max_tokens=256)
    try:
        ids = torch.randint(3, 380, (40,), generator=torch.Generator().manual_seed(1))
        trace = model.prefill(ids, chunk=33)
        tokens, logits = model.generate(ids, 2)
        return {"prompt": trace.logits, "pre": trace.pre_mix, "tokens": tokens, "answer": logits}
    finally:
        model.close()


def main(file: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    from deepinfer_vllm.triton_kernels.attention import attention
    from deepinfer_vllm.triton_kernels.gates import gates

    found: dict[str, Any] = {name: attention(**case, product=tl.float32) for name, case in attention_cases().items()}
    some = attention_cases()[SOME]
    alone = {"query": some["query"][3:4]} | {n: (some[n][0], some[n][1][3:4]) for n in ("window", "selected")}
    found["alone"] = attention(**{**some, **alone}, product=tl.float32)
    found["nothing"] = attention(some["query"][:0], (some["window"][0], some["window"][1][:0]), None, some["sink"], 1.0)
    found |= {name: gates(**case) for name, case in gate_cases().items()}
    golden = Path(__file__).resolve().parent.parent / "golden" / "v41-tiny-a"
    found |= {f"model, {kernels}": model_outputs(golden, kernels) for kernels in ("torch", "triton")}
    torch.save(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
