"""Where EPLB has put a layer's routed experts: the interface of a layer that vLLM balances.

vLLM numbers slots over all ranks, keeps in tensors which slots hold an expert, counts the tokens of each slot, and
exchanges the weights in them. What it needs of a model is in `balanced_model`.
"""

from typing import Any

import torch
from vllm.distributed.eplb.eplb_state import EplbLayerState

from deepinfer_vllm.models.deepseek_v41.experts import Experts

_HASH = 2654435769
"""2^32 over the golden ratio (Knuth, The Art of Computer Programming 3, 6.4): vLLM's choice among replicas too."""


class ExpertSlots:
    """The slots of one layer. Weights move between the steps of the thread that runs the model."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self.eplb_state = EplbLayerState()

    def get_expert_weights(self) -> list[torch.Tensor]:
        """vLLM's hook: every parameter by slot, [slots here, ...], codes and scales as bytes, which gloo can send."""
        tensors = [parameter.data for parameter in self._experts.parameters(recurse=False)]
        return [tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in tensors]

    def set_eplb_state(self, moe_layer_idx: int, **tensors: Any) -> None:
        """vLLM's hook: the tensors of all layers, of which this one has its row."""
        self.eplb_state.set_layer_state(moe_layer_idx, **tensors)

    def __call__(self, experts: torch.Tensor) -> torch.Tensor:
        """Chosen experts [T, k] to slots [T, k] int64, which are counted; replicas of an expert take tokens in turn.

        A token's experts do not depend on which replicas it meets, so neither does its result, up to rounding.
        """
        state = self.eplb_state
        assert state.logical_to_physical_map is not None and state.logical_replica_count is not None
        hashed = (torch.arange(len(experts), device=experts.device) * _HASH) & 0xFFFFFFFF
        replica = hashed.unsqueeze(-1) % state.logical_replica_count[experts]
        slots = state.logical_to_physical_map[experts, replica]
        load, record = state.expert_load_view, state.should_record_tensor
        assert load is not None and record is not None
        chosen = slots.flatten()
        load.index_add_(0, chosen, record.to(load.dtype).expand(len(chosen)))
        return slots
