"""The target's and the draft's distributions, as logits and the sums of their exponentials by block of the vocabulary.

Rows are logits: a request with d drafts has d + 1, one for each draft's place and one for the bonus token. R requests,
N rows, V tokens of vocabulary in B blocks.
"""

import functools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.integer]


def draft_rows(bounds: Indices, steps: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The row that judges each draft of each request [R, steps], and whether there is such a draft: past a request's
    drafts it is the row of its bonus token. bounds [R + 1] are the requests' first rows."""
    last = bounds[1:, None].astype(np.int64) - 1
    rows = np.minimum(bounds[:-1, None] + np.arange(steps), last)
    return rows, rows < last


def judged_tokens(drafts: Indices, rows: NDArray[np.int64]) -> Indices:
    """The token that each of some rows judges, of the tokens [N] of all rows: the one after it, -1 past the end."""
    return np.append(drafts[1:], -1)[rows]


def rows_of(logits: torch.Tensor, *indices: Indices) -> Floats:
    """logits[indices] in float32."""
    found: Floats = logits[tuple(torch.from_numpy(np.asarray(i, dtype=np.int64)) for i in indices)].float().numpy()
    return found


@dataclass(frozen=True)
class Distributions:
    """The target's [N, V] and the draft's [requests, steps, V] distributions, logits and the sums of their blocks.

    The draft's logits are before temperature. Without them a draft is a sure thing: probability 1 where it stands. Sums
    of rows that judge no draft were never made, and are anything.
    """

    target: torch.Tensor
    target_max: torch.Tensor
    target_sum: torch.Tensor
    draft: torch.Tensor | None
    draft_max: torch.Tensor
    draft_sum: torch.Tensor

    @functools.cached_property
    def target_log_sums(self) -> Floats:
        """log of the sum of exponentials over the vocabulary [N]."""
        return _log_sums(self.target_max.numpy(), self.target_sum.numpy())

    @functools.cached_property
    def draft_log_sums(self) -> Floats:
        """The same of the draft at the places of the rows; 0 without a draft's logits."""
        if self.draft is None:
            return np.zeros(len(self.target_max), dtype=np.float32)
        return _log_sums(self.draft_max.numpy(), self.draft_sum.numpy())

    def target_log_p(self, rows: Indices, tokens: Indices) -> Floats:
        """log p of tokens at rows, of one shape."""
        return rows_of(self.target, rows, tokens) - self.target_log_sums[rows]

    def draft_log_p(self, rows: Indices, requests: Indices, steps: Indices, tokens: Indices, heat: Floats) -> Floats:
        """log q of tokens, drafted by requests at steps and at temperatures `heat`; 0 without a draft's logits."""
        if self.draft is None:
            return np.zeros(tokens.shape, dtype=np.float32)
        return rows_of(self.draft, requests, steps, tokens) / heat - self.draft_log_sums[rows]


def _log_sums(maxima: Floats, sums: Floats) -> Floats:
    with np.errstate(all="ignore"):
        largest = maxima.max(-1)
        total: Floats = largest + np.log((sums * np.exp(maxima - largest[:, None])).sum(-1))
    return total
