"""Which drafted tokens stand (Leviathan et al. 2023; Sun et al. 2024 for whole blocks).

Rows are logits: a request with d drafts has d + 1, one for each draft's place and one for the bonus token. Row i judges
the token of row i + 1. R requests, N rows.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.native import invariance
from deepinfer_vllm.torch_kernels.distributions import Distributions, draft_rows, judged_tokens, rows_of
from deepinfer_vllm.torch_kernels.gumbel import add_noise, seeds_by_step
from deepinfer_vllm.torch_kernels.philox import uniform
from deepinfer_vllm.torch_kernels.registry import by_name
from deepinfer_vllm.torch_kernels.winners import best_of_blocks


def gather_draft_sampled(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Write token and position of each row [N]; -1 for a draft in a step that began within the prompt."""
    rows = slice(num_logits)
    at, local = logits_indices_ptr.numpy()[rows], expanded_local_pos_ptr.numpy()[rows]
    positions = positions_ptr.numpy()[at]
    within = positions - local < prefill_len_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[rows]]
    draft_sampled_ptr.numpy()[rows] = np.where((local > 0) & within, -1, input_ids_ptr.numpy()[at])
    pos_ptr.numpy()[rows] = positions


def flatten_sampled(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    num_warps: int = 1,
) -> None:
    """Write each request's sampled tokens, of [R, steps + 1], to its first rows of [N]."""
    flat, sampled, bounds = flat_sampled_ptr.numpy(), sampled_ptr.numpy(), cu_num_logits_ptr.tolist()
    for r, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        count = min(int(num_sampled_ptr[r]), end - start)
        flat[start : start + count] = sampled[r, :count]


@by_name
def rejection(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
    num_warps: int = 1,
    fly_entropy_ptr: torch.Tensor | None = None,
    fly_entropy_threshold: float = 0.0,
    FLY_WINDOW_SIZE: int = 0,
) -> None:
    """Write how many drafts of each request stand [R], these drafts (and at temperature 0 the target's token in place
    of the first that falls) into sampled [R, steps + 1], and the log-sums [R] of the row that decided last.

    At temperature 0 a draft stands if it is the target's best; otherwise with probability min(1, p / q), or with given
    rates (synthetic), or judged with its whole block. A draft of -1 never stands. Where answers must not depend on the
    batch, a draft stands if it is what would be drawn without it: what is drafted, and when, then changes nothing.
    Raises NotImplementedError for the fly method of vLLM 0.33.
    """
    same_draw = invariance.decided()
    USE_BLOCK_VERIFICATION = USE_BLOCK_VERIFICATION and not same_draw
    if FLY_WINDOW_SIZE:
        raise NotImplementedError("rejection_sample_method 'fly' has no PyTorch kernel; use 'standard' or 'block'")
    given = Distributions(
        target_logits_ptr,
        target_local_max_ptr,
        target_local_sumexp_ptr,
        draft_logits_ptr,
        draft_local_max_ptr,
        draft_local_sumexp_ptr,
    )
    sampled, requests = sampled_ptr.numpy(), idx_mapping_ptr.numpy()
    rows, there = draft_rows(cu_num_logits_ptr.numpy(), sampled.shape[1] - 1)
    tokens, places = judged_tokens(draft_sampled_ptr.numpy(), rows), pos_ptr.numpy()[rows]
    heat, seeds = temp_ptr.numpy()[requests, None], seed_ptr.numpy()[requests, None]
    greedy, valid, column = heat == 0, there & (tokens >= 0), np.arange(rows.shape[1])
    best = best_of_blocks(target_local_argmax_ptr.numpy(), target_local_max_ptr.numpy())[rows]
    if synthetic_conditional_rates_ptr is not None:
        passes = uniform(seeds, places) < synthetic_conditional_rates_ptr.numpy()[: len(column)]
    else:
        passes, drawn = tokens == best, valid & ~greedy
        if not USE_BLOCK_VERIFICATION and drawn.any():
            of, step = np.nonzero(drawn)
            at, drafted = rows[drawn], tokens[drawn]
            if same_draw:
                scores = rows_of(target_logits_ptr, at)
                add_noise(scores, heat[of, 0], seeds[of, 0].tolist(), places[drawn].tolist())
                passes[drawn] = drafted == scores.argmax(-1)
            else:
                q = given.draft_log_p(at, requests[of], step, drafted, heat[of, 0])
                passes[drawn] = given.target_log_p(at, drafted) > np.log(uniform(seeds[of, 0], places[drawn])) + q
    stands = np.logical_and.accumulate(valid & passes, axis=1).sum(1)
    last = column == stands[:, None]
    written = (last | (column < stands[:, None])) & np.where(greedy, there, valid)
    np.copyto(sampled[:, :-1], np.where(greedy & last, best, tokens), where=written)
    decided = np.where(~greedy[:, 0] & written.any(1), rows[:, 0] + written.sum(1) - 1, -1)
    if USE_BLOCK_VERIFICATION:
        assert cumulative_log_p_ptr is not None
        for r in np.flatnonzero(~greedy[:, 0]):
            own = there[r]
            ratios = np.exp(cumulative_log_p_ptr.numpy()[rows[r, own]])
            block = tokens[r, own].tolist(), ratios, int(rows[r, 0])
            stands[r] = _block(sampled[r], *block, given, local_residual_mass_ptr, seeds[r, 0], places[r])
            decided[r] = rows[r, 0] + stands[r] if stands[r] < own.sum() else -1
    rejected_steps_ptr.numpy()[:] = stands
    for out, sums in (
        (target_rejected_logsumexp_ptr, given.target_log_sums),
        (draft_rejected_logsumexp_ptr, given.draft_log_sums),
    ):
        out.numpy()[:] = np.where(decided >= 0, sums[decided], 0)


def _block(
    out: NDArray[np.int64],
    tokens: list[int],
    ratios: NDArray[np.float32],
    start: int,
    given: Distributions,
    residual: torch.Tensor | None,
    seed: np.int64,
    places: NDArray[np.int64],
) -> int:
    """How many stand when the longest prefix that passes its own test does; the tokens up to a -1 are written."""
    steps = np.arange(len(tokens))
    draws = uniform(seed ^ (steps << 32) if seeds_by_step() else np.array(seed), places[: len(tokens)])
    stands = 0
    for i, token in enumerate(tokens):
        if token < 0:
            break
        out[i], threshold = token, ratios[i]
        following = tokens[i + 1] if i + 1 < len(tokens) else -1
        if following >= 0:
            if residual is not None:
                mass = residual[start + i + 1].numpy().sum()
            else:
                p = np.exp(given.target_log_p(np.array(start + i + 1), np.array(following)))
                mass = ratios[i] * (np.float32(1) - p)
            whole = mass + np.float32(1) - ratios[i]
            threshold = mass / whole if whole > 0 else np.float32(1)
        if draws[i] <= threshold:
            stands = i + 1
    return stands
