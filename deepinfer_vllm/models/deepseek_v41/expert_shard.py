"""Which of the routed experts' weights one process holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dp_group, get_tp_group

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig


@dataclass(frozen=True)
class ExpertShard:
    """One rank's part of every layer's routed experts: some of them whole, or a slice of the inner width of all."""

    experts: Sequence[int]
    """Those held, in the order they are stacked."""
    inner: range
    """Of each one's inner width."""
    slots: range | None = None
    """Where EPLB moves experts: of the slots of all ranks, those here. `experts` are those that lie there at first."""

    @classmethod
    def plan(
        cls, config: ModelConfig, rank: int, ranks: int, *, by_expert: bool, placement: str = "linear"
    ) -> "ExpertShard":
        """The part of `rank` among `ranks`. `placement` is vLLM's --expert-placement-strategy, for `by_expert`."""
        inner = config.moe_intermediate_size
        if ranks == 1:
            return cls(range(config.num_experts), range(inner))
        if not by_expert:
            width = inner // ranks
            return cls(range(config.num_experts), range(rank * width, (rank + 1) * width))
        from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

        _, place, _ = determine_expert_map(ranks, rank, config.num_experts, placement)
        return cls((place >= 0).nonzero().flatten().tolist(), range(inner))

    @classmethod
    def plan_balanced(cls, config: ModelConfig, rank: int, ranks: int, redundant: int) -> "ExpertShard":
        """The part of `rank` at first, where EPLB moves experts: vLLM begins with all in turn, some a second time."""
        local = (config.num_experts + redundant) // ranks
        slots = range(rank * local, (rank + 1) * local)
        return cls([slot % config.num_experts for slot in slots], range(config.moe_intermediate_size), slots)

    @classmethod
    def here(cls, config: ModelConfig, *, balanced: bool = False) -> "ExpertShard":
        """The part of this process, by vLLM's groups and the configuration in force.

        `balanced`: of a model whose experts EPLB may move, if it is enabled.
        """
        tp, dp = get_tp_group(), get_dp_group()
        parallel = get_current_vllm_config().parallel_config
        rank, ranks = dp.rank_in_group * tp.world_size + tp.rank_in_group, dp.world_size * tp.world_size
        if balanced and parallel.enable_eplb:
            return cls.plan_balanced(config, rank, ranks, parallel.eplb_config.num_redundant_experts)
        return cls.plan(
            config,
            rank,
            ranks,
            by_expert=parallel.enable_expert_parallel,
            placement=parallel.expert_placement_strategy,
        )

    def places_of(self, expert: int) -> list[int]:
        """Where an expert held at first is stacked: in one place, or in several where EPLB has replicas."""
        if self.slots is None:
            return [self.experts.index(expert)]
        return [place for place, held in enumerate(self.experts) if held == expert]

    def place_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of all ranks to where each lies here, one past the last if elsewhere."""
        assert self.slots is not None
        here = (slots >= self.slots.start) & (slots < self.slots.stop)
        return torch.where(here, slots - self.slots.start, len(self.slots))

    def places(self, num_experts: int) -> torch.Tensor | None:
        """[num_experts] int64: where each expert is stacked, one past the last if elsewhere. None: all are held."""
        if len(self.experts) == num_experts:
            return None
        places = torch.full((num_experts,), len(self.experts))
        places[list(self.experts)] = torch.arange(len(self.experts))
        return places
