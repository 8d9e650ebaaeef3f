"""What the kernels for Ascend compute, in float64 and in loops over every index."""

from __future__ import annotations

import math

import torch

Rows = tuple[torch.Tensor, torch.Tensor]
Matrix = list[list[float]]


def attention(
    query: torch.Tensor, window: Rows, selected: Rows | None, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [T, H, D]; rows [slots, D] with slots [T, n], negative for none; sink [H] -> [T, H, D]."""
    tokens, heads, dim = query.shape
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    for t in range(tokens):
        parts = (window,) if selected is None else (window, selected)
        read = [rows[int(slot)].double() for rows, slots in parts for slot in slots[t] if slot >= 0]
        for h in range(heads):
            logits = [float(query[t, h].double() @ row) * scale for row in read]
            most = max([*logits, float(sink[h])])
            total = math.exp(float(sink[h]) - most) + sum(math.exp(logit - most) for logit in logits)
            for row, logit in zip(read, logits, strict=True):
                out[t, h] += math.exp(logit - most) / total * row
    return out


def gates(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """streams [T, M, D] -> pre [T, M], post [T, M], comb [T, M, M]."""
    m = streams.shape[1]
    pre, post, comb = [], [], []
    for token in streams.double().flatten(1):
        norm = 1 / math.sqrt(sum(float(v) ** 2 for v in token) / len(token) + norm_eps)
        raw = [float(row.double() @ token) * norm for row in fn]
        gain = [float(scale[0])] * m + [float(scale[1])] * m + [float(scale[2])] * m * m
        mixed = [r * s + float(b) for r, s, b in zip(raw, gain, base, strict=True)]
        pre.append([1 / (1 + math.exp(-v)) + eps for v in mixed[:m]])
        post.append([2 / (1 + math.exp(-v)) for v in mixed[m : 2 * m]])
        comb.append(sinkhorn([mixed[(2 + i) * m : (3 + i) * m] for i in range(m)], iterations, eps))
    return tuple(torch.tensor(part, dtype=torch.float64) for part in (pre, post, comb))  # type: ignore[return-value]


def sinkhorn(logits: Matrix, iterations: int, eps: float) -> Matrix:
    """Softmax of the rows, then columns and rows in turn, columns last."""
    matrix = [[math.exp(v - max(row)) for v in row] for row in logits]
    matrix = [[v / sum(row) + eps for v in row] for row in matrix]
    matrix = transposed(normalised(transposed(matrix), eps))
    for _ in range(iterations - 1):
        matrix = transposed(normalised(transposed(normalised(matrix, eps)), eps))
    return matrix


def normalised(matrix: Matrix, eps: float) -> Matrix:
    """Rows by their sums."""
    return [[v / (sum(row) + eps) for v in row] for row in matrix]


def transposed(matrix: Matrix) -> Matrix:
    """Rows for columns."""
    return [list(column) for column in zip(*matrix, strict=True)]


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """[T, M, D] and [T, M] -> [T, D]."""
    out = torch.zeros(streams.shape[0], streams.shape[2], dtype=torch.float64)
    for t in range(streams.shape[0]):
        for i in range(streams.shape[1]):
            out[t] += pre[t, i].double() * streams[t, i].double()
    return out


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """out[j] = post[j] * y + sum over i of comb[i, j] * streams[i]."""
    out = torch.zeros(streams.shape, dtype=torch.float64)
    tokens, m, _ = streams.shape
    for t in range(tokens):
        for j in range(m):
            out[t, j] = post[t, j].double() * y[t].double()
            for i in range(m):
                out[t, j] += comb[t, i, j].double() * streams[t, i].double()
    return out


def masked(
    scores: torch.Tensor, visible: torch.Tensor, candidates: torch.Tensor | None, block_size: int
) -> torch.Tensor:
    """scores [t, G] with -inf at rows that are not visible or, where a token has candidates, outside their blocks."""
    out = scores.clone()
    for t in range(scores.shape[0]):
        blocks = {int(b) for b in candidates[t] if b >= 0} if candidates is not None else set()
        for g in range(scores.shape[1]):
            if g >= visible[t] or (blocks and g // block_size not in blocks):
                out[t, g] = -math.inf
    return out
