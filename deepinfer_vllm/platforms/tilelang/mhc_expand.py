"""A sublayer's output into the residual streams, and these into each other: `mhc.expand`.

Vector code alone: a block is a slice of the channels of a few tokens, and reads and writes each value once.
"""

from typing import Any

import torch

from deepinfer_vllm.platforms.tilelang.dialect import dialect
from deepinfer_vllm.platforms.tilelang.launch import compiled, dtype_name, filled_up, held, slice_of, target_of

TOKENS = 8
CHANNELS = 512
"""Most of a block."""


def build(target: str, streams: int, hidden: int, dtype: str, tile: int) -> Any:
    """The kernel."""
    d = dialect(target)
    T = d.T
    tokens = T.dynamic("tokens")
    kind, width = d.held(dtype), slice_of(hidden, CHANNELS)
    slices = hidden // width

    @T.prim_func
    def mhc_expand(
        y: T.Tensor((tokens, hidden), kind),
        values: T.Tensor((tokens, streams * hidden), kind),
        post: T.Tensor((tokens, streams), "float32"),
        comb: T.Tensor((tokens, streams * streams), "float32"),
        expanded: T.Tensor((tokens, streams * hidden), kind),
    ) -> None:
        with d.kernel(T.ceildiv(tokens, tile) * slices) as step:
            start, c = T.min(step // slices * tile, tokens - tile), step % slices * width
            added, gate = d.on_vector((tile, width), kind), d.on_vector((tile, streams), "float32")
            before, after = d.on_vector((tile, streams * width), kind), d.on_vector((tile, streams * width), kind)
            mix = d.on_vector((tile, streams * streams), "float32")
            T.copy(y[start : start + tile, c : c + width], added)
            T.copy(post[start : start + tile, 0:streams], gate)
            T.copy(comb[start : start + tile, 0 : streams * streams], mix)
            for s in T.serial(streams):
                T.copy(
                    values[start : start + tile, s * hidden + c : s * hidden + c + width],
                    before[0:tile, s * width : (s + 1) * width],
                )
            with d.region():
                for b, j, k in d.each(tile, streams, width):
                    after[b, j * width + k] = d.narrowed(
                        gate[b, j] * d.widened(added[b, k])
                        + sum(mix[b, i * streams + j] * d.widened(before[b, i * width + k]) for i in range(streams)),
                        kind,
                    )
            for s in T.serial(streams):
                T.copy(
                    after[0:tile, s * width : (s + 1) * width],
                    expanded[start : start + tile, s * hidden + c : s * hidden + c + width],
                )

    return mhc_expand


def expand(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, tile: int = TOKENS
) -> torch.Tensor:
    """As `mhc.expand`."""
    tokens, m, hidden = streams.shape
    kernel = compiled(build, target_of(streams), m, hidden, dtype_name(streams), tile)
    x, rest = filled_up(streams.flatten(1).contiguous(), tile), (y.to(streams.dtype), post, comb.flatten(1))
    added, gate, mix = (filled_up(part.contiguous(), tile) for part in rest)
    out = torch.empty_like(x)
    kernel(held(added), held(x), gate, mix, held(out))
    return out[:tokens].view(tokens, m, hidden)
