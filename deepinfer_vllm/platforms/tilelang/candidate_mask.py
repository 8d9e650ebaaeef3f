"""The mask before an index source's top-k: what `candidate_mask.mask_scores` sets to -inf, in one pass over the scores.

A block is a tile of one token's scores. The token's candidates are laid out as flags of the tile's blocks, which each
score then looks up; a tile's flags fit beside it whatever the context's length.
"""

from typing import Any

import torch

from deepinfer_vllm.platforms.tilelang.dialect import dialect
from deepinfer_vllm.platforms.tilelang.launch import compiled, target_of

TILE = 8192
"""Most scores of a tile."""


def build(target: str, candidates: int, block_size: int, tile: int) -> Any:
    """The kernel. Each token has room for so many `candidates`, -1 behind the last; with 0, every block is admitted."""
    d = dialect(target)
    T = d.T
    tokens, rows = T.dynamic("tokens"), T.dynamic("rows")
    room = max(candidates, 1)
    blocks = tile // block_size + 2  # a tile may begin and end inside one

    @T.prim_func
    def candidate_mask(
        scores: T.Tensor((tokens, rows), "float32"),
        visible: T.Tensor((tokens,), "int32"),
        candidate_blocks: T.Tensor((tokens, room), "int32"),
    ) -> None:
        with d.kernel(tokens * T.ceildiv(rows, tile)) as step:
            token, start = step // T.ceildiv(rows, tile), T.min(step % T.ceildiv(rows, tile) * tile, rows - tile)
            part, kept = d.on_vector((tile,), "float32"), d.on_vector((room,), "int32")
            flags = d.on_vector((blocks,), "int32")
            T.copy(scores[token, start : start + tile], part)
            T.copy(candidate_blocks[token, 0:room], kept)
            with d.region():
                for n in d.each(blocks):
                    flags[n] = T.if_then_else(kept[0] < 0, 1, 0)
                for n in d.each(room):
                    if (kept[n] >= start // block_size) & (kept[n] < start // block_size + blocks):
                        flags[kept[n] - start // block_size] = 1
                for n in d.each(tile):
                    seen = (start + n < visible[token]) & (flags[(start + n) // block_size - start // block_size] != 0)
                    part[n] = T.if_then_else(seen, part[n], -T.infinity("float32"))
            T.copy(part, scores[token, start : start + tile])

    return candidate_mask


def candidate_mask(
    scores: torch.Tensor, visible: torch.Tensor, candidates: torch.Tensor | None, block_size: int, *, tile: int = TILE
) -> None:
    """As `candidate_mask.mask_scores`, in place. What fills up `candidates` must be behind the last."""
    tokens, rows = scores.shape
    if not tokens or not rows:
        return
    if candidates is None or not candidates.shape[1]:
        candidates, room = torch.full((tokens, 1), -1, device=scores.device), 0
    else:
        room = candidates.shape[1]
    kernel = compiled(build, target_of(scores), room, block_size, _tile(rows, tile))
    whole = scores.contiguous()
    kernel(whole, visible.int().contiguous(), candidates.int().contiguous())
    if whole is not scores:
        scores.copy_(whole)


def _tile(rows: int, most: int) -> int:
    """The largest power of two, `most` at most, that is no more than `rows`: few kernels for all lengths."""
    return min(most, 1 << (rows.bit_length() - 1))
