"""Run a kernel on a CPU beside the loops and beside the portable model's operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_vllm.models.deepseek_v41 import candidate_mask as portable_mask
from deepinfer_vllm.models.deepseek_v41 import gather_attention as portable_attention
from deepinfer_vllm.models.deepseek_v41 import mhc as portable_mhc
from tiles import loops
from tiles.cases import ATTENTION, MASKS, STREAMS, AttentionCase, MaskCase, StreamsCase

EPS, NORM_EPS = 1e-6, 1e-20
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Check:
    """One kernel on one input."""

    kernel: str
    case: Any
    dtype: torch.dtype
    run: Callable[[], Tensors]
    loops: Callable[[], Tensors]
    portable: Callable[[], Tensors]

    @property
    def error(self) -> float:
        """Of what `relative` may be: what float32 sums leave, or a rounding to bfloat16 (of weights, of a result)."""
        return 2e-5 if self.dtype == torch.float32 else 2.0**-8

    def errors(self) -> tuple[float, float]:
        """The largest difference from the loops, and from the portable operation, each beside the largest value."""
        got = self.run()
        return relative(got, self.loops()), relative(got, self.portable())


def relative(got: Tensors, want: Tensors) -> float:
    """Largest difference of any element over the largest finite value of its tensor; infinite where infinities or
    shapes differ."""
    worst = 0.0
    for one, other in zip(got, want, strict=True):
        a, b = one.double(), other.double()
        finite = b.isfinite()
        if a.shape != b.shape or not torch.equal(a.masked_fill(finite, 0), b.masked_fill(finite, 0)):
            return float("inf")
        if finite.any():
            largest = float(b[finite].abs().max()) or 1.0
            worst = max(worst, float((a - b)[finite].abs().nan_to_num(torch.inf).max()) / largest)
    return worst


def checks() -> Iterator[Check]:
    """Every kernel on every case that concerns it in float32, on the first and the last in bfloat16."""
    for attention_case in ATTENTION:
        yield _attention(attention_case, torch.float32)
    for streams_case in STREAMS:
        yield from _streams(streams_case, torch.float32)
    for attention_case in (ATTENTION[0], ATTENTION[-1]):
        yield _attention(attention_case, torch.bfloat16)
    for streams_case in (STREAMS[0], STREAMS[-1]):
        yield from _streams(streams_case, torch.bfloat16)
    for mask_case in MASKS:
        yield _mask(mask_case)


def _attention(case: AttentionCase, dtype: torch.dtype) -> Check:
    query, window, selected, sink = case.inputs(dtype)
    scale = case.dim**-0.5

    def run() -> Tensors:
        from deepinfer_vllm.platforms.tilelang.sparse_attention import sparse_attention

        return (sparse_attention(query, window, selected, sink, scale, tile=case.tile),)

    return Check(
        "sparse_attention",
        case,
        dtype,
        run,
        lambda: (loops.attention(query, window, selected, sink, scale),),
        lambda: (portable_attention.located_attention(query, window, selected, sink, scale),),
    )


def _streams(case: StreamsCase, dtype: torch.dtype) -> Iterator[Check]:
    given = case.inputs(dtype)
    streams, pre, y = given["streams"], given["pre"], given["y"]
    weights = given["fn"], given["base"], given["scale"], case.iterations, EPS, NORM_EPS
    mix = given["post"], given["comb"]

    def delayed() -> Tensors:
        from deepinfer_vllm.platforms.tilelang.delayed_mhc import delayed

        return delayed(streams, pre, *weights, tile=case.tile)

    def gates() -> Tensors:
        from deepinfer_vllm.platforms.tilelang.delayed_mhc import gates

        return gates(streams, *weights)

    def expand() -> Tensors:
        from deepinfer_vllm.platforms.tilelang.mhc_expand import expand

        return (expand(y, streams, *mix, tile=case.tile),)

    def looped() -> Tensors:
        return loops.gates(streams, *weights)

    yield Check(
        "delayed_mhc",
        case,
        dtype,
        delayed,
        lambda: (loops.collapse(streams, pre), *looped()),
        lambda: portable_mhc.delayed(streams, pre, *weights),
    )
    yield Check("delayed_mhc, gates alone", case, dtype, gates, looped, lambda: portable_mhc.gates(streams, *weights))
    yield Check(
        "mhc_expand",
        case,
        dtype,
        expand,
        lambda: (loops.expand(y, streams, *mix),),
        lambda: (portable_mhc.expand(y, streams, *mix),),
    )


def _mask(case: MaskCase) -> Check:
    scores, visible, candidates = case.inputs()

    def run() -> Tensors:
        from deepinfer_vllm.platforms.tilelang.candidate_mask import candidate_mask

        masked = scores.clone()
        candidate_mask(masked, visible, candidates, case.block_size, tile=case.tile)
        return (masked,)

    def portable() -> Tensors:
        masked = scores.clone()
        portable_mask.mask_scores(masked, visible, candidates, case.block_size)
        return (masked,)

    def looped() -> Tensors:
        return (loops.masked(scores, visible, candidates, case.block_size),)

    return Check("candidate_mask", case, torch.float32, run, looped, portable)
