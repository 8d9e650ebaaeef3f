"""Which drafted tokens stand (Leviathan et al. 2023; Sun et al. 2024 for whole blocks).

Rows are logits: a request with d drafts has d + 1, one for each draft's place and one for the bonus token. Row i judges
the token of row i + 1. R requests, N rows.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.torch_kernels.gumbel import seeds_by_step
from deepinfer_vllm.torch_kernels.logit_sums import Distributions
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
    rates (synthetic), or judged with its whole block. A draft of -1 never stands. Raises NotImplementedError for the
    fly method of vLLM 0.33.
    """
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
    sampled, bounds = sampled_ptr.numpy(), cu_num_logits_ptr.tolist()
    drafts, positions = draft_sampled_ptr.tolist(), pos_ptr.tolist()
    for r, request in enumerate(idx_mapping_ptr.tolist()):
        rows = slice(bounds[r], bounds[r + 1] - 1)
        tokens, places = drafts[rows.start + 1 : rows.stop + 1], positions[rows]
        temperature, seed = float(temp_ptr[request]), int(seed_ptr[request])
        rates = None if synthetic_conditional_rates_ptr is None else synthetic_conditional_rates_ptr.tolist()
        lucky = rates and [uniform(seed, p) < np.float32(rate) for p, rate in zip(places, rates, strict=False)]
        decided = None  # the row whose sums are asked for
        if temperature == 0:
            best = best_of_blocks(target_local_argmax_ptr.numpy()[rows], target_local_max_ptr.numpy()[rows])
            stands = _greedy(sampled[r], tokens, best, lucky)
        elif USE_BLOCK_VERIFICATION:
            assert cumulative_log_p_ptr is not None
            ratios = np.exp(cumulative_log_p_ptr.numpy()[rows])
            stands = _block(sampled[r], tokens, ratios, rows.start, given, local_residual_mass_ptr, seed, places)
            decided = rows.start + stands if stands < len(tokens) else None
        else:
            if lucky is None:
                lucky = _likely(tokens, rows.start, given, request, temperature, seed, places)
            stands = _leading(tokens, lucky)
            judged = [token for token in tokens[: stands + 1] if token >= 0]
            sampled[r, : len(judged)] = judged
            decided = rows.start + len(judged) - 1 if judged else None
        rejected_steps_ptr[r] = stands
        target_rejected_logsumexp_ptr[r] = 0.0 if decided is None else float(given.target_log_sum(decided))
        draft_rejected_logsumexp_ptr[r] = 0.0 if decided is None else float(given.draft_log_sum(decided))


def _greedy(out: NDArray[np.int64], tokens: list[int], best: list[int], lucky: list[bool] | None) -> int:
    """How many stand; these and the best token in place of the first that falls are written."""
    stands = _leading(tokens, [t == b for t, b in zip(tokens, best, strict=True)] if lucky is None else lucky)
    written = tokens[:stands] + best[stands : stands + 1]
    out[: len(written)] = written
    return stands


def _leading(tokens: list[int], lucky: list[bool]) -> int:
    """How many tokens before the first that is -1 or not lucky."""
    falls = (i for i, (token, luck) in enumerate(zip(tokens, lucky, strict=False)) if token < 0 or not luck)
    return next(falls, len(tokens))


def _likely(
    tokens: list[int],
    start: int,
    given: Distributions,
    request: int,
    temperature: float,
    seed: int,
    places: list[int],
) -> list[bool]:
    """Whether each token passes the ratio test p > u * q, up to the first that does not."""
    passed = []
    for i, token in enumerate(tokens):
        if token < 0:
            break
        q = given.draft_log_p(start + i, request, i, token, temperature)
        passed.append(bool(given.target_log_p(start + i, token) > np.log(uniform(seed, places[i])) + q))
        if not passed[-1]:
            break
    return passed + [False] * (len(tokens) - len(passed))


def _block(
    out: NDArray[np.int64],
    tokens: list[int],
    ratios: NDArray[np.float32],
    start: int,
    given: Distributions,
    residual: torch.Tensor | None,
    seed: int,
    places: list[int],
) -> int:
    """How many stand when the longest prefix that passes its own test does; the tokens up to a -1 are written."""
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
                mass = ratios[i] * (np.float32(1) - np.exp(given.target_log_p(start + i + 1, following)))
            whole = mass + np.float32(1) - ratios[i]
            threshold = mass / whole if whole > 0 else np.float32(1)
        if uniform(seed ^ (i << 32) if seeds_by_step() else seed, places[i]) <= threshold:
            stands = i + 1
    return stands
