"""Thinking budgets: where reasoning last began and ended, and the forced end of one whose tokens are used up."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def update_committed_marker_cache(
    req_ids_ptr: torch.Tensor,
    thinking_token_budget_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    cached_last_start_ptr: torch.Tensor,
    cached_last_end_ptr: torch.Tensor,
    cached_scan_pos_ptr: torch.Tensor,
    reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    BLOCK: int,
) -> None:
    """Write, of each request with a budget, the last places of both markers, or -1, and from where to look next.

    A first scan goes back from the end a block at a time and stops at the first block in which a marker begins.
    """
    start, end = reasoning_start_token_ids_ptr.tolist(), natural_reasoning_end_token_ids_ptr.tolist()
    for request in req_ids_ptr.tolist():
        if thinking_token_budget_ptr[request] < 0:
            continue
        total, scan = int(total_len_ptr[request]), int(cached_scan_pos_ptr[request])
        last_start, last_end = int(cached_last_start_ptr[request]), int(cached_last_end_ptr[request])
        tokens = all_token_ids_ptr[request, :total].numpy()
        if scan > total:
            scan, last_start, last_end = 0, -1, -1
        if scan == 0 and last_start < 0 and last_end < 0:
            high = total
            while high > 0 and last_start < 0 and last_end < 0:
                low = max(high - BLOCK, 0)
                last_start, last_end = last_match(tokens, start, low, high), last_match(tokens, end, low, high)
                high = low
        else:
            last_start = last_match(tokens, start, scan, total, last_start)
            last_end = last_match(tokens, end, scan, total, last_end)
        cached_last_start_ptr[request], cached_last_end_ptr[request] = last_start, last_end
        cached_scan_pos_ptr[request] = max(total - MAX_LEN + 1, 0)


def thinking_budget(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    thinking_token_budget_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cached_last_start_ptr: torch.Tensor,
    cached_last_end_ptr: torch.Tensor,
    reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor,
    reasoning_end_token_ids_ptr: torch.Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
) -> None:
    """Force the next token of the end marker in each row [T, vocabulary] whose request reasons beyond its budget,
    the drafts before the row included."""
    start, natural = reasoning_start_token_ids_ptr.tolist(), natural_reasoning_end_token_ids_ptr.tolist()
    forced = reasoning_end_token_ids_ptr.tolist()
    places = expanded_local_pos_ptr.tolist()
    for row, request in enumerate(expanded_idx_mapping_ptr.tolist()):
        budget, total = int(thinking_token_budget_ptr[request]), int(total_len_ptr[request])
        if budget < 0:
            continue
        first = max(total - max(START_LEN, NATURAL_END_LEN, END_LEN), 0)
        drafts = input_ids_ptr[row - places[row] + 1 : row + 1]
        tail = torch.cat([all_token_ids_ptr[request, first:total], drafts.to(all_token_ids_ptr.dtype)]).numpy()
        began = _after(tail, start, total, first, int(cached_last_start_ptr[request]))
        ended = _after(tail, natural, total, first, int(cached_last_end_ptr[request]))
        if began < 0 or began <= ended or first + len(tail) - (began + START_LEN) < budget:
            continue
        done = [n for n in range(1, END_LEN) if n <= len(tail) and tail[len(tail) - n :].tolist() == forced[:n]]
        logits_ptr[row, forced[max(done, default=0)]] = 1e9


def _after(tail: NDArray[np.int32], marker: Sequence[int], total: int, first: int, known: int) -> int:
    """The last place of a marker that ends among the drafts, or else the known one; `tail` begins at place `first`."""
    low = max(total - len(marker) + 1, 0) - first
    return first + last_match(tail, marker, low, len(tail), known - first)


def last_match(tokens: NDArray[np.int32], marker: Sequence[int], low: int, high: int, otherwise: int = -1) -> int:
    """The last i in [low, high) with tokens[i : i + len(marker)] == marker."""
    high = min(high, len(tokens) - len(marker) + 1)
    if high <= low:
        return otherwise
    found: NDArray[np.bool_] = np.ones(high - low, dtype=bool)
    for offset, token in enumerate(marker):
        found &= tokens[low + offset : high + offset] == token
    places = np.flatnonzero(found)
    return low + int(places[-1]) if len(places) else otherwise
