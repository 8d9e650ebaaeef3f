"""What vLLM's EPLB asks of a model whose experts it moves (its MixtureOfExperts protocol), for the portable V4.1."""

from collections.abc import Sequence
from typing import Any

from deepinfer_vllm.models.deepseek_v41.expert_slots import ExpertSlots


class BalancedModel:
    """Mixed into the model. Without EPLB its fields are not there, and vLLM takes the model for one it need not
    balance."""

    def announce_experts(self, layers: Sequence[ExpertSlots], experts: int, redundant: int, ranks: int) -> None:
        """Show vLLM the layers it may balance; each rank holds the same number of slots."""
        self.moe_layers = layers
        self.num_moe_layers = len(layers)
        self.num_expert_groups = 1
        self.num_shared_experts = 0
        self.num_logical_experts = self.num_routed_experts = experts
        self.update_physical_experts_metadata(experts + redundant, (experts + redundant) // ranks)

    def update_physical_experts_metadata(self, num_physical_experts: int, num_local_physical_experts: int) -> None:
        """vLLM's hook."""
        self.num_physical_experts = num_physical_experts
        self.num_local_physical_experts = num_local_physical_experts
        self.num_redundant_experts = num_physical_experts - self.num_logical_experts
        self.expert_weights: list[Any] = []

    def set_eplb_state(self, expert_load_view: Any, logical_to_physical_map: Any, logical_replica_count: Any) -> None:
        """vLLM's hook: the tensors that every layer maps by and counts in, changed in place as experts move."""
        self.expert_weights = [layer.get_expert_weights() for layer in self.moe_layers]
        for index, layer in enumerate(self.moe_layers):
            layer.set_eplb_state(
                index,
                expert_load_view=expert_load_view,
                logical_to_physical_map=logical_to_physical_map,
                logical_replica_count=logical_replica_count,
            )
