"""Which function stands for which kernel of vLLM, and whether it fits the vLLM that is installed."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_V2 = "vllm.v1.worker.gpu"
_HERE = "deepinfer_vllm.torch_kernels"

KERNELS: dict[str, str] = {
    f"{_V2}.{kernel}": f"{_HERE}.{function}"
    for kernel, function in {
        "block_table._compute_slot_mappings_kernel": "block_tables:compute_slot_mappings",
        "block_table._gather_block_tables_kernel": "block_tables:gather_block_tables",
        "buffer_utils._apply_write_kernel": "buffers:apply_write",
        "input_batch._combine_sampled_and_draft_tokens_kernel": "input_batch:combine_sampled_and_draft_tokens",
        "input_batch._expand_idx_mapping_kernel": "input_batch:expand_idx_mapping",
        "input_batch._get_num_sampled_and_rejected_kernel": "input_batch:get_num_sampled_and_rejected",
        "input_batch._post_update_kernel": "post_update:post_update",
        "input_batch._post_update_num_computed_tokens_kernel": "post_update:post_update_num_computed_tokens",
        "input_batch._prepare_pos_seq_lens_kernel": "input_batch:prepare_pos_seq_lens",
        "input_batch._prepare_prefill_inputs_kernel": "input_batch:prepare_prefill_inputs",
        "metrics.logits._num_nans_kernel": "logits:num_nans",
        "sample.bad_words._bad_words_kernel": "logits:bad_words",
        "sample.gumbel._gumbel_sample_kernel": "gumbel:gumbel_sample",
        "sample.gumbel._temperature_kernel": "logits:temperature",
        "sample.logit_bias._bias_kernel": "logits:bias",
        "sample.logprob._fill_logprob_token_ids_kernel": "logprobs:fill_logprob_token_ids",
        "sample.logprob._ranks_kernel": "logprobs:ranks",
        "sample.logprob._topk_log_softmax_kernel": "logprobs:topk_log_softmax",
        "sample.min_p._min_p_kernel": "logits:min_p",
        "sample.penalties._bincount_kernel": "penalties:bincount",
        "sample.penalties._penalties_kernel": "penalties:penalties",
        "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": "logprobs:prompt_logprobs_token_ids",
        "sample.thinking_budget._thinking_budget_kernel": "thinking_budget:thinking_budget",
        "sample.thinking_budget._update_committed_marker_cache_kernel": "thinking_budget:update_committed_marker_cache",
        "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": "draft_block:prepare_dflash_inputs",
        "spec_decode.rejection_sampler._flatten_sampled_kernel": "verification:flatten_sampled",
        "spec_decode.rejection_sampler._gather_draft_sampled_kernel": "verification:gather_draft_sampled",
        "spec_decode.rejection_sampler_utils._compute_cumulative_log_p_kernel": "logit_sums:cumulative_log_p",
        "spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel": "logit_sums:local_logits_stats",
        "spec_decode.rejection_sampler_utils._compute_local_residual_mass_kernel": "logit_sums:local_residual_mass",
        "spec_decode.rejection_sampler_utils._insert_resampled_kernel": "resampling:insert_resampled",
        "spec_decode.rejection_sampler_utils._rejection_kernel": "verification:rejection",
        "spec_decode.rejection_sampler_utils._resample_kernel": "resampling:resample",
        "structured_outputs._apply_grammar_bitmask_kernel": "logits:grammar_bitmask",
    }.items()
} | {"vllm.v1.worker.utils._zero_kv_blocks_kernel": f"{_HERE}.blocks:zero_kv_blocks"}
"""Kernel to "module:function". A kernel that is not here, or does not fit, is named when it is launched."""


def takes_grid(function: Function) -> Function:
    """Mark a function whose first parameter is the launch grid, a tuple of ints."""
    function.takes_grid = True  # type: ignore[attr-defined]
    return function


def by_name(function: Function) -> Function:
    """Mark a function whose parameters stand in the order of one vLLM's kernel and are reached by name in another's."""
    function.by_name = True  # type: ignore[attr-defined]
    return function


def bound(function: Callable[..., Any], kernel_parameters: tuple[str, ...]) -> Callable[..., Any]:
    """The function, launched like a kernel with these parameters."""
    if not getattr(function, "by_name", False):
        return function
    positional = [name for name in kernel_parameters if not name.isupper()]

    @functools.wraps(function)
    def launch(*args: Any, **constants: Any) -> None:
        function(**dict(zip(positional, args, strict=True)), **constants)

    return launch


def load(target: str) -> Callable[..., Any]:
    """Import "module:function"."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def fits(kernel_parameters: tuple[str, ...], function: Callable[..., Any]) -> bool:
    """Whether launches of a kernel with these parameters reach the right ones of the function.

    vLLM gives the constants, in capitals, by name and everything else by position. What a kernel of another vLLM does
    not have must have a default here.
    """
    parameters = list(inspect.signature(function).parameters.values())[getattr(function, "takes_grid", False) :]
    names = [p.name for p in parameters]
    positional = [name for name in kernel_parameters if not name.isupper()]
    absent = [p for p in parameters if p.name not in kernel_parameters]
    in_order = getattr(function, "by_name", False) or names[: len(positional)] == positional
    return in_order and set(kernel_parameters) <= set(names) and all(p.default is not p.empty for p in absent)
