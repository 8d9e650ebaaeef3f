"""Attention of a request's consecutive tokens: what `gather_attention` computes, with rows read once for many tokens.

Windows of neighbours overlap, so a block of tokens is one matrix product over their common rows, of which each token
keeps its diagonal band. Compressed rows differ by token: while few are visible, all of them are multiplied and the ones
not selected masked; beyond that, each token's own are gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

BLOCK_TOKENS = 32
"""Tokens of one product. More waste more of the band's corners, fewer the products' width."""

DENSE_FACTOR = 2
"""All visible rows are multiplied while they are at most so many times those selected: one wide product is that much
faster than one a token, and nothing is copied."""


@dataclass(frozen=True)
class Compressed:
    """Compressed rows of one request as its tokens see them."""

    selected: torch.Tensor
    """[T, K] int64, -1 where there is none."""
    ratio: int
    read: Callable[[torch.Tensor], torch.Tensor]
    """Rows at an index tensor: [*index, D]."""


def is_dense(visible: int, selected: int) -> bool:
    """Whether a block whose last token sees `visible` rows and selects `selected` of them multiplies them all. Always
    while a token of it may see no row at all, for then there is nothing finite to gather."""
    return visible <= max(DENSE_FACTOR * selected, BLOCK_TOKENS)


def span_attention(
    query: torch.Tensor,
    start: int,
    window_rows: torch.Tensor,
    window: int,
    compressed: Compressed | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """query [T, H, D] at positions start, start + 1, ... to [T, H, D] float32.

    window_rows [R, D] end with the last token's and hold whatever is in a token's reach; sink [H] float32.
    """
    tokens = query.shape[0]
    base = start + tokens - window_rows.shape[0]  # position of the first window row
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    every = _dense_rows(start, tokens, compressed)
    for low in range(0, tokens, BLOCK_TOKENS):
        high = min(low + BLOCK_TOKENS, tokens)
        first = max(base, start + low - window + 1)
        rows = window_rows[first - base : start + high - base].float()
        hidden = first - (start + low - window + 1)  # rows that the first token's window lacks
        block = _Block(query[low:high].float(), rows, hidden, window, scale)
        if compressed is None:
            out[low:high] = block.attend(sink, None, None)
            continue
        selected, visible = compressed.selected[low:high], (start + high) // compressed.ratio
        if is_dense(visible, selected.shape[1]):
            out[low:high] = block.attend(sink, every[:visible], _unselected(selected, visible))
        else:
            own = compressed.read(selected.clamp_min(0)).float()
            out[low:high] = block.attend(sink, own, selected < 0)
    return out


def _dense_rows(start: int, tokens: int, compressed: Compressed | None) -> torch.Tensor:
    """The rows that dense blocks multiply [G, D]; none where there is no such block."""
    if compressed is None:
        return torch.empty(0)
    selected, most = compressed.selected, 0
    for low in range(0, tokens, BLOCK_TOKENS):
        visible = (start + min(low + BLOCK_TOKENS, tokens)) // compressed.ratio
        most = visible if is_dense(visible, selected.shape[1]) else most
    return compressed.read(torch.arange(most, device=selected.device)).float()


def _unselected(selected: torch.Tensor, visible: int) -> torch.Tensor:
    """[t, visible] bool."""
    mask = torch.ones(selected.shape[0], visible + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(1, torch.where(selected < 0, visible, selected), False)[:, :visible]


class _Block:
    """t tokens over rows that end with the last of them; `hidden` of the first token's window are not there."""

    def __init__(self, query: torch.Tensor, rows: torch.Tensor, hidden: int, window: int, scale: float) -> None:
        self._query, self._rows, self._hidden, self._window = query * scale, rows, hidden, window

    def attend(
        self, sink: torch.Tensor, compressed: torch.Tensor | None, excluded: torch.Tensor | None
    ) -> torch.Tensor:
        """[t, H, D]. `compressed` [G, D] common to all tokens or [t, G, D], of which `excluded` [t, G] bool do not
        count."""
        tokens, heads, dim = self._query.shape
        flat, columns = self._query.flatten(0, 1), tokens + self._window - 1
        full = nn.functional.pad(flat @ self._rows.T, (self._hidden, 0))
        band = full.as_strided((tokens, heads, self._window), (heads * columns + 1, columns, 1))
        count = 0 if compressed is None else compressed.shape[-2]
        scores = self._query.new_empty(tokens, heads, self._window + count + 1)
        scores[..., : self._window] = band
        if self._hidden:
            reach = torch.arange(self._window, device=band.device) + torch.arange(tokens, device=band.device)[:, None]
            scores[..., : self._window].masked_fill_((reach < self._hidden).unsqueeze(1), float("-inf"))
        if compressed is not None and excluded is not None:
            part = scores[..., self._window : -1]
            if compressed.dim() == 2:
                part.copy_((flat @ compressed.T).view(tokens, heads, count))
            else:
                part.copy_(torch.bmm(self._query, compressed.transpose(1, 2)))
            part.masked_fill_(excluded.unsqueeze(1), float("-inf"))
        scores[..., -1] = sink
        weights = torch.softmax(scores, dim=-1)
        full.zero_()
        band.copy_(weights[..., : self._window])
        out = full[:, self._hidden :] @ self._rows
        if compressed is None:
            return out.view(tokens, heads, dim)
        mine = weights[..., self._window : -1]
        if compressed.dim() == 2:
            return out.addmm_(mine.flatten(0, 1), compressed).view(tokens, heads, dim)
        return out.view(tokens, heads, dim).baddbmm_(mine, compressed)
