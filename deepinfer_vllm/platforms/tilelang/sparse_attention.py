"""Attention of each token over the rows it names: what `gather_attention.located_attention` computes, in one pass.

A block is a token with all heads: tiles of rows are gathered by slot next to the cube unit, multiplied by the queries,
weighted by an online softmax that starts at the sink, and summed. A row is read once, as key and as value.
"""

from typing import Any

import torch
from torch import nn

from deepinfer_vllm.models.deepseek_v41.gather_attention import Rows
from deepinfer_vllm.platforms.tilelang.dialect import ASCEND, C, dialect
from deepinfer_vllm.platforms.tilelang.launch import compiled, dtype_name, held, slice_of, target_of

TILE = 128
"""Rows of a tile: those of a window."""

CHANNELS = 128
"""Most of a product of weights and rows: the cube unit takes so many beside a tile of rows."""

HEADS = {C: 1, ASCEND: 32}
"""What the heads of a kernel are a multiple of: 16 rows of the cube unit for each vector core. Others are filled up."""

LOWEST = -3.0e38
"""In place of -inf: differences of two stay finite."""


def build(target: str, heads: int, dim: int, dtype: str, widths: tuple[int, int], scale: float, tile: int) -> Any:
    """The kernel. `widths`: channels from one cached row of the window to the next, and of the selected ones."""
    d = dialect(target)
    T = d.T
    tokens, window_rows, window_reach, selected_rows, selected_reach = (
        T.dynamic(name) for name in ("tokens", "window_rows", "window_reach", "selected_rows", "selected_reach")
    )
    own, kind, width = heads // d.vectors, d.held(dtype), slice_of(dim, CHANNELS)

    @T.macro
    def visit(cached, slots, token, query, rows, products, place, scores, weights, held_weights, state, parts):  # noqa: ANN001, ANN202
        most, seen, fade, total, out = state
        left, right, sums, part = parts
        for block in T.serial(T.ceildiv(slots.shape[1], tile)):
            T.copy(slots[token, block * tile : (block + 1) * tile], place)
            for n in T.serial(tile):
                if slots[token, block * tile + n] >= 0:
                    T.copy(cached[slots[token, block * tile + n], 0:dim], rows[n, 0:dim])
            d.matmul(query, rows, products, True)
            d.share(products, scores)
            with d.region():
                for h, n in d.each(own, tile):
                    scores[h, n] = T.if_then_else(place[n] >= 0, scores[h, n] * scale, LOWEST)
                d.row_max(scores, seen)
                for h in d.each(own):
                    seen[h] = T.max(most[h], seen[h])
                    fade[h] = T.exp(most[h] - seen[h])
                    most[h] = seen[h]
                for h, n in d.each(own, tile):
                    scores[h, n] = T.if_then_else(place[n] >= 0, T.exp(scores[h, n] - most[h]), 0.0)
                    weights[h, n] = d.narrowed(scores[h, n], kind)
                d.row_sum(scores, seen)
                for h in d.each(own):
                    total[h] = total[h] * fade[h] + seen[h]
            d.share(weights, held_weights)
            for c in T.serial(dim // width):
                d.weighted_rows(held_weights, rows, c * width, left, right, sums)
                d.share(sums, part)
                with d.region():
                    for h, k in d.each(own, width):
                        out[h, c * width + k] = out[h, c * width + k] * fade[h] + part[h, k]

    @T.prim_func
    def sparse_attention(
        query: T.Tensor((tokens, heads, dim), kind),
        window: T.Tensor((window_rows, widths[0]), kind),
        window_slots: T.Tensor((tokens, window_reach), "int32"),
        selected: T.Tensor((selected_rows, widths[1]), kind),
        selected_slots: T.Tensor((tokens, selected_reach), "int32"),
        sink: T.Tensor((heads,), "float32"),
        attended: T.Tensor((tokens, heads, dim), "float32"),
    ) -> None:
        with d.kernel(tokens) as token:
            asked, rows = d.on_cube((heads, dim), kind), d.on_cube((tile, dim), kind)
            products, sums = d.accumulator((heads, tile)), d.accumulator((heads, width))
            held_weights = d.on_cube((heads, tile), kind)
            left, right = d.left((heads, tile), kind), d.right((tile, width), kind)
            place = d.on_vector((tile,), "int32")
            scores, weights = d.on_vector((own, tile), "float32"), d.on_vector((own, tile), kind)
            part, out = d.on_vector((own, width), "float32"), d.on_vector((own, dim), "float32")
            total, most = d.on_vector((own,), "float32"), d.on_vector((own,), "float32")
            seen, fade = d.on_vector((own,), "float32"), d.on_vector((own,), "float32")
            T.copy(query[token, 0:heads, 0:dim], asked)
            T.fill(rows, 0)  # what a slot names nothing for stays finite
            d.share(sink[0:heads], most)
            with d.region():
                for h in d.each(own):
                    most[h] = T.max(most[h], LOWEST)
                    total[h] = 1.0
                for h, c in d.each(own, dim):
                    out[h, c] = 0.0
            state, parts = (most, seen, fade, total, out), (left, right, sums, part)
            shared = (asked, rows, products, place, scores, weights, held_weights, state, parts)
            visit(window, window_slots, token, *shared)
            visit(selected, selected_slots, token, *shared)
            with d.region():
                for h, c in d.each(own, dim):
                    out[h, c] = out[h, c] / total[h]
            d.share(out, attended[token, 0:heads, 0:dim])

    return sparse_attention


def sparse_attention(
    query: torch.Tensor, window: Rows, selected: Rows | None, sink: torch.Tensor, scale: float, *, tile: int = TILE
) -> torch.Tensor:
    """As `gather_attention.located_attention`. Weights are rounded to the rows' dtype before they meet the rows."""
    tokens, heads, dim = query.shape
    target = target_of(query)
    more = -heads % HEADS[target]
    none = torch.full((tokens, tile), -1, dtype=torch.int32, device=query.device)
    window_rows, selected_rows = _whole(window[0]), _whole(window[0] if selected is None else selected[0])
    widths = window_rows.shape[1], selected_rows.shape[1]
    kernel = compiled(build, target, heads + more, dim, dtype_name(window_rows), widths, scale, tile)
    out = torch.empty(tokens, heads + more, dim, dtype=torch.float32, device=query.device)
    kernel(
        held(nn.functional.pad(query.to(window_rows.dtype), (0, 0, 0, more)).contiguous()),
        held(window_rows),
        _padded(window[1], tile),
        held(selected_rows),
        none if selected is None else _padded(selected[1], tile),
        nn.functional.pad(sink.float(), (0, more)).contiguous(),
        out,
    )
    return out[:, :heads]


def _whole(rows: torch.Tensor) -> torch.Tensor:
    """Rows [slots, D] with whatever lies between one and the next."""
    slots, width = rows.shape[0], rows.stride(0)
    there = rows.untyped_storage().nbytes() // rows.itemsize - rows.storage_offset()
    if rows.stride(1) != 1 or width < rows.shape[1] or there < slots * width:
        return rows.contiguous()
    return rows.as_strided((slots, width), (width, 1))


def _padded(slots: torch.Tensor, tile: int) -> torch.Tensor:
    """[T, n] as int32, with -1 up to a whole number of tiles, at least one."""
    count = max(1, -(-slots.shape[1] // tile)) * tile
    return nn.functional.pad(slots.int(), (0, count - slots.shape[1]), value=-1).contiguous()
