"""The mixing weights of hyper-connections from their projection, with all Sinkhorn rounds: one launch for a hundred."""

from typing import Any

import torch
import triton
import triton.language as tl

TOKENS = 16
"""Of one program."""


def gates(
    mixes: torch.Tensor,
    norm: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    streams: int,
    width: int,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `mhc.HyperConnection` makes of its projection: (pre [T, M], post [T, M], comb [T, M, M]), float32.

    mixes [T, (2 + M) * M] float32, of streams that are not normalised; norm [T], their Euclidean norms; `width`
    channels each; base [(2 + M) * M], scale [3].
    """
    tokens = len(mixes)
    pre, post = mixes.new_empty(tokens, streams), mixes.new_empty(tokens, streams)
    comb = mixes.new_empty(tokens, streams, streams)
    if tokens:
        _gates[(triton.cdiv(tokens, TOKENS),)](
            mixes.contiguous(),
            norm.contiguous(),
            base,
            scale,
            pre,
            post,
            comb,
            tokens,
            width,
            eps,
            norm_eps,
            STREAMS=streams,
            BLOCK=triton.next_power_of_2(streams),
            ITERATIONS=iterations,
            TOKENS=TOKENS,
        )
    return pre, post, comb


@triton.jit
def _gates(
    mixes: "Any",
    norm: "Any",
    base: "Any",
    scale: "Any",
    pre: "Any",
    post: "Any",
    comb: "Any",
    tokens: "Any",
    width: "Any",
    eps: "Any",
    norm_eps: "Any",
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> "Any":
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    size = tl.load(norm + token, mask=there, other=0.0)
    smaller = 1.0 / tl.sqrt(size * size / width + norm_eps)
    stream = tl.arange(0, BLOCK)
    kept = there[:, None] & (stream < STREAMS)[None, :]
    at = token[:, None] * ((2 + STREAMS) * STREAMS) + stream[None, :]
    to = token[:, None] * STREAMS + stream[None, :]
    for part in tl.static_range(2):
        offset = part * STREAMS
        value = tl.load(mixes + at + offset, mask=kept, other=0.0) * smaller[:, None] * tl.load(scale + part)
        value += tl.load(base + offset + stream, mask=stream < STREAMS, other=0.0)[None, :]
        value = 1.0 / (1.0 + tl.exp(-value))
        if part == 0:
            tl.store(pre + to, value + eps, mask=kept)
        else:
            tl.store(post + to, 2.0 * value, mask=kept)
    pair = stream[:, None] * STREAMS + stream[None, :]
    square = (stream < STREAMS)[:, None] & (stream < STREAMS)[None, :]
    kept = there[:, None, None] & square[None, :, :]
    at = token[:, None, None] * ((2 + STREAMS) * STREAMS) + 2 * STREAMS + pair[None, :, :]
    value = tl.load(mixes + at, mask=kept, other=0.0) * smaller[:, None, None] * tl.load(scale + 2)
    value += tl.load(base + 2 * STREAMS + pair, mask=square, other=0.0)[None, :, :]
    value = tl.where(square[None, :, :], value, float("-inf"))
    value = tl.exp(value - tl.max(tl.where(square[None, :, :], value, -1e30), axis=2)[:, :, None])
    value = value / tl.maximum(tl.sum(value, axis=2), 1e-30)[:, :, None]
    value = tl.where(square[None, :, :], value + eps, 0.0)
    value = value / (tl.sum(value, axis=1) + eps)[:, None, :]
    for _ in tl.static_range(ITERATIONS - 1):
        value = value / (tl.sum(value, axis=2) + eps)[:, :, None]
        value = value / (tl.sum(value, axis=1) + eps)[:, None, :]
    tl.store(comb + token[:, None, None] * (STREAMS * STREAMS) + pair[None, :, :], value, mask=kept)
