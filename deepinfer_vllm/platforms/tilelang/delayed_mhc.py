"""The gates of delayed hyper-connections, `mhc.gates`, and with them the collapse by the gates before, `mhc.delayed`.

A tile of tokens is multiplied by the projection a slice of the channels at a time; on its way each slice is squared for
the norm and collapsed, so that the streams are read once. What follows is a few numbers a token. Where tiles do not
divide the tokens, the last begins earlier and some values are written twice.
"""

import functools
from typing import Any

import torch

from deepinfer_vllm.models.deepseek_v41.mhc import Gates
from deepinfer_vllm.platforms.tilelang.dialect import dialect
from deepinfer_vllm.platforms.tilelang.launch import compiled, dtype_name, filled_up, held, slice_of, target_of

TOKENS = 32
"""Of a tile: enough rows for the cube unit, half of them for each vector core."""

CHANNELS = 256
"""Most of a slice."""


def build(
    target: str,
    streams: int,
    hidden: int,
    dtype: str,
    iterations: int,
    eps: float,
    norm_eps: float,
    collapses: bool,
    tile: int,
) -> Any:
    """The kernel of `mhc.delayed`; without `collapses` that of `mhc.gates`, which leaves `collapsed` alone."""
    d = dialect(target)
    T = d.T
    tokens = T.dynamic("tokens")
    own, kind, outputs, width = tile // d.vectors, d.held(dtype), (2 + streams) * streams, slice_of(hidden, CHANNELS)
    columns = -(-outputs // 16) * 16  # of the cube unit; what those behind `outputs` hold stays in them

    @T.macro
    def columns_normalised(mixed, total):  # noqa: ANN001, ANN202
        for b, j in d.each(own, streams):
            total[b, j] = sum(column(mixed, b, j, streams)) + eps
        for b, i, j in d.each(own, streams, streams):
            mixed[b, i * streams + j] /= total[b, j]

    @T.macro
    def sinkhorn(mixed, total):  # noqa: ANN001, ANN202
        for b, i in d.each(own, streams):
            total[b, i] = functools.reduce(T.max, row(mixed, b, i, streams))
        for b, i, j in d.each(own, streams, streams):
            mixed[b, i * streams + j] = T.exp(mixed[b, i * streams + j] - total[b, i])
        for b, i in d.each(own, streams):
            total[b, i] = sum(row(mixed, b, i, streams))
        for b, i, j in d.each(own, streams, streams):
            mixed[b, i * streams + j] = mixed[b, i * streams + j] / total[b, i] + eps
        columns_normalised(mixed, total)
        for _ in T.serial(iterations - 1):
            for b, i in d.each(own, streams):
                total[b, i] = sum(row(mixed, b, i, streams)) + eps
            for b, i, j in d.each(own, streams, streams):
                mixed[b, i * streams + j] /= total[b, i]
            columns_normalised(mixed, total)

    @T.prim_func
    def delayed_mhc(
        values: T.Tensor((tokens, streams * hidden), kind),
        previous: T.Tensor((tokens, streams), "float32"),
        fn: T.Tensor((outputs, streams * hidden), "float32"),
        base: T.Tensor((outputs,), "float32"),
        scale: T.Tensor((3,), "float32"),
        collapsed: T.Tensor((tokens, hidden), kind),
        pre: T.Tensor((tokens, streams), "float32"),
        post: T.Tensor((tokens, streams), "float32"),
        comb: T.Tensor((tokens, streams * streams), "float32"),
    ) -> None:
        with d.kernel(T.ceildiv(tokens, tile)) as block:
            start = T.min(block * tile, tokens - tile)
            left, right = d.on_cube((tile, width), "float32"), d.on_cube((columns, width), "float32")
            product = d.accumulator((tile, columns))
            piece, wide = d.on_vector((own, width), kind), d.on_vector((own, width), "float32")
            squares, sums = d.on_vector((own, width), "float32"), d.on_vector((own, width), "float32")
            rounded, before = d.on_vector((own, width), kind), d.on_vector((own, streams), "float32")
            raw, norm = d.on_vector((own, columns), "float32"), d.on_vector((own,), "float32")
            bases, scales = d.on_vector((outputs,), "float32"), d.on_vector((3,), "float32")
            own_pre, own_post = d.on_vector((own, streams), "float32"), d.on_vector((own, streams), "float32")
            mixed, total = d.on_vector((own, streams * streams), "float32"), d.on_vector((own, streams), "float32")
            T.copy(base, bases)
            T.copy(scale, scales)
            if collapses:
                d.share(previous[start : start + tile, 0:streams], before)
            with d.region():
                for b, k in d.each(own, width):
                    squares[b, k] = 0.0
            for c in T.serial(hidden // width):
                for s in T.serial(streams):
                    first = s * hidden + c * width
                    d.share(values[start : start + tile, first : first + width], piece)
                    with d.region():
                        for b, k in d.each(own, width):
                            wide[b, k] = d.widened(piece[b, k])
                            squares[b, k] += wide[b, k] * wide[b, k]
                            if collapses:
                                sums[b, k] = T.if_then_else(s == 0, 0.0, sums[b, k]) + before[b, s] * wide[b, k]
                    d.share(wide, left)
                    T.copy(fn[0:outputs, first : first + width], right[0:outputs, 0:width])
                    d.matmul(left, right, product, (c == 0) & (s == 0))
                if collapses:
                    with d.region():
                        for b, k in d.each(own, width):
                            rounded[b, k] = d.narrowed(sums[b, k], kind)
                    d.share(rounded, collapsed[start : start + tile, c * width : (c + 1) * width])
            d.share(product, raw)
            with d.region():
                d.row_sum(squares, norm)
                for b in d.each(own):
                    norm[b] = T.rsqrt(norm[b] / (streams * hidden) + norm_eps)
                for b, i in d.each(own, streams):
                    own_pre[b, i] = sigmoid(T, raw[b, i] * norm[b] * scales[0] + bases[i]) + eps
                    own_post[b, i] = 2.0 * sigmoid(T, raw[b, streams + i] * norm[b] * scales[1] + bases[streams + i])
                for b, i in d.each(own, streams * streams):
                    mixed[b, i] = raw[b, 2 * streams + i] * norm[b] * scales[2] + bases[2 * streams + i]
                sinkhorn(mixed, total)
            d.share(own_pre, pre[start : start + tile, 0:streams])
            d.share(own_post, post[start : start + tile, 0:streams])
            d.share(mixed, comb[start : start + tile, 0 : streams * streams])

    return delayed_mhc


def sigmoid(T: Any, x: Any) -> Any:
    """Of an expression."""
    return 1.0 / (1.0 + T.exp(-x))


def row(matrices: Any, b: Any, i: Any, streams: int) -> list[Any]:
    """Elements of row i of matrix b in matrices [B, streams * streams]."""
    return [matrices[b, i * streams + j] for j in range(streams)]


def column(matrices: Any, b: Any, j: Any, streams: int) -> list[Any]:
    """Elements of column j of matrix b."""
    return [matrices[b, i * streams + j] for i in range(streams)]


def delayed(
    streams: torch.Tensor,
    pre: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
    *,
    tile: int = TOKENS,
) -> tuple[torch.Tensor, *Gates]:
    """As `mhc.delayed`; without `pre`, what is collapsed holds nothing."""
    tokens, m, hidden = streams.shape
    x = filled_up(streams.flatten(1).contiguous(), tile)
    room = x.shape[0]
    kernel = compiled(
        build, target_of(streams), m, hidden, dtype_name(streams), iterations, eps, norm_eps, pre is not None, tile
    )
    collapsed = x.new_empty(room if pre is not None else tile, hidden)
    out = [torch.empty(room, n, dtype=torch.float32, device=x.device) for n in (m, m, m * m)]
    before = out[0] if pre is None else filled_up(pre.contiguous(), tile)
    kernel(held(x), before, fn.contiguous(), base.contiguous(), scale.contiguous(), held(collapsed), *out)
    return collapsed[:tokens], out[0][:tokens], out[1][:tokens], out[2][:tokens].view(-1, m, m)


def gates(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Gates:
    """As `mhc.gates`."""
    return delayed(streams, None, fn, base, scale, iterations, eps, norm_eps)[1:]
