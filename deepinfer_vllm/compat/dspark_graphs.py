"""Full CUDA graphs for steps that verify any number of drafts, where our budget decides how many.

For method "dspark" vLLM captures steps that verify every draft; one that verifies fewer, or none, runs in pieces. What
it captures for its own adaptive verification serves from none to all, and it plans that wherever the runner holds a
manager of it while caches are made. So something stands in that place for as long.
"""

from typing import Any

PLANNING = object()
"""Stands for the manager. The runner calls nothing of it before the caches are made."""


def any_drafts(module: Any, vllm_config: Any, given: dict[str, Any]) -> object | None:
    """`PLANNING`, where the attention backends replay steps whose requests have unequal numbers of tokens; else None.

    module: vLLM's, of adaptive verification; given: what its factory of a manager is called with.
    """
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return None
    from vllm.v1.attention.backend import AttentionCGSupport

    from deepinfer_vllm.spec_decode.settings import Settings, trimming_problems

    if Settings.read(current=False).form == "fixed" or trimming_problems(vllm_config):
        return None
    most = given["req_states"].num_speculative_steps + given["num_bonus_tokens"]
    refused = module.get_varlen_cudagraph_unsupported_backend(
        given["attn_groups"], vllm_config, most, checked_layer_names=given.get("target_layer_names")
    )
    support, _ = given.get("additional_attn_cg_support") or (AttentionCGSupport.ALWAYS, None)
    return PLANNING if refused is None and support == AttentionCGSupport.ALWAYS else None
