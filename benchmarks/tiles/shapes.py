"""The shapes that DeepSeek-V4.1-Flash has on a device, for which AscendC is emitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer_vllm.platforms.tilelang import candidate_mask, delayed_mhc, mhc_expand, sparse_attention

HEADS, HEAD_DIM, INDEX_DIM = 64, 512, 128
STREAMS, HIDDEN, ROUNDS, EPS, NORM_EPS = 4, 5120, 20, 1e-6, 1e-20
CANDIDATES, BLOCK = 2048, 8
DTYPE = "bfloat16"

Shape = tuple[Callable[..., Any], tuple[Any, ...]]


def attention(heads: int) -> Shape:
    """With so many heads on a rank."""
    widths = (HEAD_DIM, HEAD_DIM + INDEX_DIM)
    arguments = (heads, HEAD_DIM, DTYPE, widths, HEAD_DIM**-0.5, sparse_attention.TILE)
    return sparse_attention.build, arguments


def mhc(*, collapses: bool) -> Shape:
    """The gates of a sublayer, with or without the collapse before it."""
    arguments = (STREAMS, HIDDEN, DTYPE, ROUNDS, EPS, NORM_EPS, collapses, delayed_mhc.TOKENS)
    return delayed_mhc.build, arguments


SHAPES: dict[str, Shape] = {
    "sparse_attention, 64 heads": attention(HEADS),
    "sparse_attention, 32 heads": attention(HEADS // 2),
    "delayed_mhc": mhc(collapses=True),
    "delayed_mhc, gates alone": mhc(collapses=False),
    "mhc_expand": (mhc_expand.build, (STREAMS, HIDDEN, DTYPE, mhc_expand.TOKENS)),
    "candidate_mask": (candidate_mask.build, (CANDIDATES, BLOCK, candidate_mask.TILE)),
    "candidate_mask, none published": (candidate_mask.build, (0, BLOCK, candidate_mask.TILE)),
}
"""Builder and its arguments behind the target, by name."""
