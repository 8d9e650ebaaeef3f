"""Draft layers that EPLB does not balance, in an engine where it balances the target's.

vLLM gives every expert layer of an engine with EPLB a state, and leaves those of DeepSeek-V4.1's DSpark draft, whose
experts are of another number, unregistered: its routers then refuse the first step, "EPLB requires expert_load_view !=
None". Such a layer was loaded with expert e in slot e and nothing ever moves there, so its router can go
on as without EPLB; vLLM's own fused layers of V4 do just that.
"""

import functools
from typing import Any

from deepinfer_vllm.compat.late import after_import

_FIELDS = ("expert_load_view", "logical_to_physical_map", "logical_replica_count")


def let_drafts_stay() -> None:
    """Let layers that nobody registered with EPLB route as if it were off."""
    after_import("vllm.model_executor.layers.fused_moe.router.base_router", _wrap)


def _wrap(module: Any) -> None:
    router = module.BaseRouter
    names = ("_validate_eplb_state", "_apply_eplb_mapping")
    if hasattr(router, "deepinfer_lets_stay") or not all(hasattr(router, name) for name in names):
        return
    validate, apply = (getattr(router, name) for name in names)

    @functools.wraps(validate)
    def validate_registered(self: Any) -> None:
        if not _is_unregistered(self.eplb_state):
            validate(self)

    @functools.wraps(apply)
    def apply_registered(self: Any, topk_ids: Any) -> Any:
        return topk_ids if _is_unregistered(self.eplb_state) else apply(self, topk_ids)

    router.deepinfer_lets_stay = True
    router._validate_eplb_state, router._apply_eplb_mapping = validate_registered, apply_registered


def _is_unregistered(state: Any) -> bool:
    """Whether a layer has a state of which nothing was ever set; half of one is an error that vLLM reports."""
    return state is not None and all(getattr(state, name) is None for name in _FIELDS)
