"""Attention of each token over its own cached rows, read where they lie, once for keys and values.

One program has a token and a few of its heads, and goes over the token's rows with a running softmax. What it does
follows from the token's own rows alone, so its result has the same bits in any batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

Rows = tuple[torch.Tensor, torch.Tensor]
"""Cached rows [slots, D], and for each token the slots of those it reads [T, n] int64, negative for none."""

BLOCK_HEADS = 16
"""Heads of a program: a matrix unit multiplies no fewer rows at a time. More read a token's rows less often, in fewer
programs."""
BLOCK_ROWS = 32
OPTIONS = {16: {"num_warps": 4, "num_stages": 2}, 64: {"num_warps": 8, "num_stages": 2}}
"""By heads of a program."""
PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def attention(
    query: torch.Tensor,
    window: Rows,
    selected: Rows | None,
    sink: torch.Tensor,
    scale: float,
    product: Any = None,
    block_heads: int = BLOCK_HEADS,
) -> torch.Tensor:
    """`gather_attention.gather_attention` over cached rows in place, the window's before the selected: query [T, H, D]
    to [T, H, D] float32.

    product: what is multiplied, Triton's type; the query's own by default. Sums and softmax are float32. block_heads: a
    key of `OPTIONS`; another number of them may change the last bits. The sink must be finite.
    """
    tokens, heads, dim = query.shape
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if not tokens:
        return out
    rows, slots = window
    more, more_slots = (rows, slots[:, :0]) if selected is None else selected
    query, slots, more_slots = query.contiguous(), slots.contiguous(), more_slots.contiguous()
    _attention[(tokens, triton.cdiv(heads, block_heads))](
        query,
        rows,
        rows.stride(0),
        rows.stride(1),
        slots,
        slots.shape[1],
        more,
        more.stride(0),
        more.stride(1),
        more_slots,
        more_slots.shape[1],
        sink.float(),
        out,
        scale,
        heads,
        dim,
        BLOCK_HEADS=block_heads,
        BLOCK_ROWS=BLOCK_ROWS,
        WIDTH=max(16, triton.next_power_of_2(dim)),
        PRODUCT=PRODUCTS[query.dtype] if product is None else product,
        **OPTIONS[block_heads],
    )
    return out


@triton.jit
def _attention(
    query: "Any",
    rows: "Any",
    row_stride: "Any",
    channel_stride: "Any",
    slots: "Any",
    count: "Any",
    more: "Any",
    more_row_stride: "Any",
    more_channel_stride: "Any",
    more_slots: "Any",
    more_count: "Any",
    sink: "Any",
    out: "Any",
    scale: "Any",
    heads: "Any",
    dim: "Any",
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> "Any":
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, WIDTH)
    at = (token * heads + head[:, None]) * dim + channel[None, :]
    there = (head < heads)[:, None] & (channel < dim)[None, :]
    own = tl.load(query + at, mask=there, other=0.0).to(PRODUCT)
    most = tl.load(sink + head, mask=head < heads, other=0.0)  # the sink is a row without a value
    total = tl.full([BLOCK_HEADS], 1.0, tl.float32)
    value = tl.zeros([BLOCK_HEADS, WIDTH], tl.float32)
    most, total, value = _over(
        own, most, total, value, rows, row_stride, channel_stride, slots + token * count, count, scale, dim,
        BLOCK_ROWS, WIDTH, PRODUCT,
    )  # fmt: skip
    most, total, value = _over(
        own, most, total, value, more, more_row_stride, more_channel_stride, more_slots + token * more_count,
        more_count, scale, dim, BLOCK_ROWS, WIDTH, PRODUCT,
    )  # fmt: skip
    tl.store(out + at, value / total[:, None], mask=there)


@triton.jit
def _over(
    query: "Any",
    most: "Any",
    total: "Any",
    value: "Any",
    rows: "Any",
    row_stride: "Any",
    channel_stride: "Any",
    slots: "Any",
    count: "Any",
    scale: "Any",
    dim: "Any",
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> "Any":
    """Go on with a softmax over further rows: the largest logit [B], the sum of weights [B], that of values [B, W]."""
    channel = tl.arange(0, WIDTH)
    for first in range(0, count, BLOCK_ROWS):
        place = first + tl.arange(0, BLOCK_ROWS)
        slot = tl.load(slots + place, mask=place < count, other=-1)
        at = slot[:, None] * row_stride + channel[None, :] * channel_stride
        row = tl.load(rows + at, mask=(slot >= 0)[:, None] & (channel < dim)[None, :], other=0.0).to(PRODUCT)
        logits = tl.dot(query, tl.trans(row), input_precision="ieee") * scale
        logits = tl.where((slot >= 0)[None, :], logits, float("-inf"))
        larger = tl.maximum(most, tl.max(logits, axis=1))
        weights = tl.exp(logits - larger[:, None])
        kept = tl.exp(most - larger)
        total = total * kept + tl.sum(weights, axis=1)
        value = value * kept[:, None] + tl.dot(weights.to(PRODUCT), row, input_precision="ieee")
        most = larger
    return most, total, value
