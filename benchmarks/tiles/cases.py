"""Inputs of the kernels for Ascend, small enough for loops, with what is seldom among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Rows = tuple[torch.Tensor, torch.Tensor]


def generator(seed: int) -> torch.Generator:
    """The same numbers for the same seed."""
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> torch.Tensor:
    """float32."""
    return torch.randn(*shape, generator=generator(seed))


@dataclass(frozen=True)
class AttentionCase:
    """`selected` None: a layer without compressed rows."""

    tokens: int
    heads: int
    dim: int
    window: int
    selected: int | None
    tile: int

    def inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, Rows, Rows | None, torch.Tensor]:
        """Of some tokens, one reads nothing (if there are two) and one everything. Rows lie apart, and what no token
        reads is NaN."""
        query = normal(1, self.tokens, self.heads, self.dim).to(dtype)
        window = self._rows(2, self.window, 0, dtype)
        selected = None if self.selected is None else self._rows(3, self.selected, 5, dtype)
        return query, window, selected, normal(4, self.heads)

    def _rows(self, seed: int, reach: int, behind: int, dtype: torch.dtype) -> Rows:
        count = 3 * reach + 1
        slots = torch.stack([torch.randperm(count, generator=generator(seed + 10 * t)) for t in range(self.tokens)])
        slots = slots[:, :reach]
        none = torch.rand(slots.shape, generator=generator(seed)) < 0.3
        none[0] = False
        if self.tokens > 1:
            none[1] = True
        slots = slots.masked_fill(none, -1)
        rows = torch.full((count, self.dim + behind), torch.nan, dtype=dtype)
        read = slots[slots >= 0].unique()
        rows[read, : self.dim] = normal(seed, count, self.dim)[read].to(dtype)
        return rows[:, : self.dim], slots


ATTENTION = [
    AttentionCase(3, 4, 8, 11, 5, 4),
    AttentionCase(5, 1, 16, 1, 1, 4),  # one head, one row
    AttentionCase(2, 3, 7, 9, None, 4),  # odd sizes, no compressed rows
    AttentionCase(2, 64, 64, 128, 40, 128),  # the tile of the device
]


@dataclass(frozen=True)
class StreamsCase:
    """Tokens of M streams of D channels."""

    tokens: int
    streams: int
    hidden: int
    iterations: int
    tile: int

    def inputs(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """By the name of the parameter."""
        t, m, d = self.tokens, self.streams, self.hidden
        outputs = (2 + m) * m
        return {
            "streams": normal(1, t, m, d).to(dtype),
            "pre": normal(2, t, m),
            "fn": normal(3, outputs, m * d) * (m * d) ** -0.5,
            "base": normal(4, outputs),
            "scale": normal(5, 3),
            "y": normal(6, t, d).to(dtype),
            "post": normal(7, t, m),
            "comb": normal(8, t, m, m),
        }


STREAMS = [
    StreamsCase(1, 4, 32, 20, 4),  # fewer tokens than a tile
    StreamsCase(7, 4, 33, 20, 4),  # tiles overlap, an odd width
    StreamsCase(8, 2, 512, 1, 4),  # two slices
    StreamsCase(3, 1, 7, 2, 2),  # one stream
    StreamsCase(33, 4, 64, 20, 32),  # the tile of the device
]


@dataclass(frozen=True)
class MaskCase:
    """Tokens, rows of scores, candidates a token has room for (None: no list at all), rows of a block."""

    tokens: int
    rows: int
    candidates: int | None
    block_size: int
    tile: int

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """scores, visible, candidates: one token has none, one as many as fit, the others some."""
        scores = normal(1, self.tokens, self.rows)
        visible = torch.randint(0, self.rows + 1, (self.tokens,), generator=generator(2))
        visible[0] = self.rows
        if self.candidates is None:
            return scores, visible, None
        blocks = -(-self.rows // self.block_size)
        lists = torch.full((self.tokens, self.candidates), -1)
        for t in range(1, self.tokens):
            count = min(self.candidates, blocks) if t == 1 else t % (min(self.candidates, blocks) + 1)
            lists[t, :count] = torch.randperm(blocks, generator=generator(t))[:count].sort().values
        return scores, visible, lists


MASKS = [
    MaskCase(4, 40, 3, 8, 16),
    MaskCase(5, 37, 4, 8, 16),  # tiles overlap inside a block
    MaskCase(3, 1, 1, 8, 16),
    MaskCase(6, 50, 7, 3, 16),  # a block that no power of two divides
    MaskCase(2, 33, 100, 8, 16),  # room for more than there are
    MaskCase(3, 20, None, 8, 16),
    MaskCase(3, 20, 0, 8, 16),
    MaskCase(4, 9000, 40, 8, 8192),  # the tile of the device
]
