"""Sums of exponentials of logits, by block and whole, and what block verification needs of them.

Rows are logits: a request with d drafts has d + 1, one for each draft's place and one for the bonus token. N rows, V
tokens of vocabulary in B blocks.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.torch_kernels.registry import by_name

Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Distributions:
    """The target's [N, V] and the draft's [requests, steps, V] distributions, logits and the sums of their blocks.

    The draft's logits are before temperature. Without them a draft is a sure thing: probability 1 where it stands.
    """

    target: torch.Tensor
    target_max: torch.Tensor
    target_sum: torch.Tensor
    draft: torch.Tensor | None
    draft_max: torch.Tensor
    draft_sum: torch.Tensor

    def target_log_sum(self, row: int) -> np.float32:
        """log of the sum of exponentials over the vocabulary."""
        return _log_sum(self.target_max, self.target_sum, row)

    def draft_log_sum(self, row: int) -> np.float32:
        """The same of the draft at the place of `row`; 0 without a draft's logits."""
        return np.float32(0) if self.draft is None else _log_sum(self.draft_max, self.draft_sum, row)

    def target_log_p(self, row: int, token: int) -> np.float32:
        """log p of a token."""
        return np.float32(self.target[row, token]) - self.target_log_sum(row)

    def draft_log_p(self, row: int, request: int, step: int, token: int, temperature: float) -> np.float32:
        """log q of a token; 0 without a draft's logits."""
        if self.draft is None:
            return np.float32(0)
        return np.float32(self.draft[request, step, token]) / np.float32(temperature) - self.draft_log_sum(row)


def _log_sum(maxima: torch.Tensor, sums: torch.Tensor, row: int) -> np.float32:
    m, s = maxima[row].numpy(), sums[row].numpy()
    largest = m.max()
    return np.float32(largest + np.log((s * np.exp(m - largest)).sum()))


@by_name
def local_logits_stats(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    num_speculative_steps: int | None = None,
    num_logits: int | None = None,
) -> None:
    """Per block [N, B] of the target's logits: at temperature 0 its largest and where, otherwise its largest and the
    sum of exponentials relative to it; the same of the draft's. Rows of bonus tokens, as far as they show, stay."""
    local, requests = expanded_local_pos_ptr.numpy(), expanded_idx_mapping_ptr.tolist()
    for row in np.flatnonzero(is_draft_place(local, num_speculative_steps)):
        temperature = float(temp_ptr[requests[row]])
        blocks = _blocks(target_logits_ptr[row, :vocab_size].float().numpy(), BLOCK_SIZE)
        if temperature == 0:
            best = blocks.argmax(-1)
            target_local_argmax_ptr[row] = torch.from_numpy(best + np.arange(len(best)) * BLOCK_SIZE)
            target_local_max_ptr[row] = torch.from_numpy(blocks.max(-1))
            continue
        _store(target_local_max_ptr, target_local_sumexp_ptr, row, blocks)
        if draft_logits_ptr is not None:
            logits = draft_logits_ptr[requests[row], local[row], :vocab_size].float().numpy() / np.float32(temperature)
            _store(draft_local_max_ptr, draft_local_sumexp_ptr, row, _blocks(logits, BLOCK_SIZE))


def is_draft_place(local: NDArray[np.integer], steps: int | None) -> NDArray[np.bool_]:
    """[N] rows that judge a draft: by the drafts a request can have, or (vLLM 0.33) by where the next one begins."""
    return local < steps if steps is not None else np.append(local[1:], 0) != 0


def _blocks(values: Floats, size: int, fill: float = -np.inf) -> Floats:
    return np.pad(values, (0, -len(values) % size), constant_values=fill).reshape(-1, size)


def _store(maxima: torch.Tensor, sums: torch.Tensor, row: int, blocks: Floats) -> None:
    largest = blocks.max(-1)
    finite = np.where(largest > -np.inf, largest, np.float32(0))
    maxima[row] = torch.from_numpy(largest)
    sums[row] = torch.from_numpy(np.exp(blocks - finite[:, None]).sum(-1))


def cumulative_log_p(
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
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
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    num_warps: int = 1,
) -> None:
    """For each draft's row: the log of the running ratio of target and draft probability, never above 0. Drafts of -1
    keep it; requests of temperature 0 have none."""
    given = Distributions(
        target_logits_ptr,
        target_local_max_ptr,
        target_local_sumexp_ptr,
        draft_logits_ptr,
        draft_local_max_ptr,
        draft_local_sumexp_ptr,
    )
    bounds, drafts = cu_num_logits_ptr.tolist(), draft_sampled_ptr.tolist()
    for r, request in enumerate(idx_mapping_ptr.tolist()):
        temperature = float(temp_ptr[request])
        if temperature == 0:
            continue
        ratio = np.float32(0)
        for step, row in enumerate(range(bounds[r], bounds[r + 1] - 1)):
            token = drafts[row + 1]
            if token >= 0:
                q = given.draft_log_p(row, request, step, token, temperature)
                ratio = min(ratio + (given.target_log_p(row, token) - q), np.float32(0))
            cumulative_log_p_ptr[row] = float(ratio)


@by_name
def local_residual_mass(
    local_residual_mass_ptr: torch.Tensor,
    local_residual_mass_stride: int,
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_logits_ptr: torch.Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    vocab_num_blocks: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    num_speculative_steps: int | None = None,
    num_logits: int | None = None,
) -> None:
    """Per block [N, B]: how much of the target's mass, times the ratio so far, exceeds the draft's. Only for rows of
    second and later drafts."""
    given = Distributions(
        target_logits_ptr,
        target_local_max_ptr,
        target_local_sumexp_ptr,
        draft_logits_ptr,
        draft_local_max_ptr,
        draft_local_sumexp_ptr,
    )
    local, requests = expanded_local_pos_ptr.numpy(), expanded_idx_mapping_ptr.tolist()
    drafts = draft_sampled_ptr.tolist()
    for row in np.flatnonzero(is_draft_place(local, num_speculative_steps) & (local > 0)):
        temperature = float(temp_ptr[requests[row]])
        if row + 1 >= len(drafts) or drafts[row + 1] < 0 or temperature == 0:
            continue
        target = target_logits_ptr[row, :vocab_size].float().numpy() - given.target_log_sum(row)
        draft = draft_logits_ptr[requests[row], local[row], :vocab_size].float().numpy() / np.float32(temperature)
        ratio = np.exp(np.float32(cumulative_log_p_ptr[row - 1]))
        excess = np.maximum(ratio * np.exp(target) - np.exp(draft - given.draft_log_sum(row)), np.float32(0))
        local_residual_mass_ptr[row] = torch.from_numpy(_blocks(excess, BLOCK_SIZE, fill=0).sum(-1))
