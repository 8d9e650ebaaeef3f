"""Experts that EPLB moves: as vLLM lays them out, over ranks that are threads, with the whole's results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.balanced_model import BalancedModel
from deepinfer_vllm.models.deepseek_v41.expert_shard import ExpertShard
from deepinfer_vllm.models.deepseek_v41.expert_slots import ExpertSlots
from deepinfer_vllm.models.deepseek_v41.experts import Experts
from small_model import both_configs, fill, generator, normal

RANKS, EXPERTS = 3, 8


def balanced(redundant: int) -> tuple[Experts, list[Experts], list[list[int]]]:
    """The whole, each rank's slots loaded from it by expert, and the experts in each rank's slots."""
    config, _ = both_configs()
    whole = Experts(config, torch.float32, ExpertShard.plan(config, 0, 1, by_expert=False))
    fill(whole, seed=1)
    shards = [ExpertShard.plan_balanced(config, rank, RANKS, redundant) for rank in range(RANKS)]
    parts = [Experts(config, torch.float32, shard) for shard in shards]
    for part in parts:
        for expert in {*part.shard.experts}:
            for name, weight in (
                ("w1", whole.w13[expert, : whole.inner]),
                ("w3", whole.w13[expert, whole.inner :]),
                ("w2", whole.w2[expert]),
            ):
                part.load(expert, name, weight)
    return whole, parts, [list(part.shard.experts) for part in parts]


def maps(placement: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's logical_to_physical_map [E, most replicas] and logical_replica_count [E] of a layer."""
    from vllm.distributed.eplb.eplb_state import compute_logical_maps

    return compute_logical_maps(torch.tensor(placement), EXPERTS)


def slots_of(part: Experts, placement: list[int], load: torch.Tensor, record: bool = True) -> ExpertSlots:
    to_slots, replicas = maps(placement)
    slots = ExpertSlots(part)
    slots.set_eplb_state(
        0,
        expert_load_view=load.unsqueeze(0),
        logical_to_physical_map=to_slots.unsqueeze(0),
        logical_replica_count=replicas.unsqueeze(0),
    )
    slots.eplb_state.should_record_tensor = torch.tensor(record)
    return slots


@pytest.mark.parametrize("redundant", [1, 4, 10])
def test_layout_is_vllms(redundant: int) -> None:
    from vllm.distributed.eplb.eplb_state import EplbState

    _, _, held = balanced(redundant)
    assert sum(held, []) == list(EplbState.build_initial_global_physical_to_logical_map(EXPERTS, redundant))
    assert len({len(part) for part in held}) == 1


@pytest.mark.parametrize("redundant", [1, 4])
def test_ranks_add_up_to_the_whole(redundant: int) -> None:
    """As loaded, and after weights and maps were exchanged at random."""
    whole, parts, held = balanced(redundant)
    x, weights = normal(2, 40, 32), torch.rand(40, 2, generator=generator(3))
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator(n))[:2] for n in range(40)])
    want = whole(x, chosen, weights)
    placement = sum(held, [])
    for seed in (None, 5, 6):
        if seed is not None:
            order = torch.randperm(len(placement), generator=generator(seed)).tolist()
            placement = [placement[slot] for slot in order]
            views = [ExpertSlots(part).get_expert_weights() for part in parts]
            for number, tensors in enumerate(zip(*views, strict=True)):
                moved = torch.cat(tensors)[order]
                for view, part_of in zip(views, moved.chunk(RANKS), strict=True):
                    view[number].copy_(part_of)
        load = torch.zeros(len(placement), dtype=torch.int32)
        picked = [slots_of(part, placement, load)(chosen) for part in parts]
        assert all(torch.equal(slots, picked[0]) for slots in picked)
        assert torch.equal(torch.tensor(placement)[picked[0]], chosen)
        assert load.tolist() == (RANKS * torch.bincount(picked[0].flatten(), minlength=len(placement))).tolist()
        got = sum(part(x, picked[0], weights) for part in parts)
        assert (got - want).abs().max() <= 1e-5


def test_replicas_share_and_loads_may_be_left_uncounted() -> None:
    _, parts, held = balanced(10)
    placement = sum(held, [])
    load = torch.zeros(len(placement), dtype=torch.int32)
    chosen = torch.zeros(3000, 1, dtype=torch.int64)
    assert slots_of(parts[0], placement, load, record=False)(chosen).unique().tolist() == [0, 8, 16]
    assert not load.any()
    slots_of(parts[0], placement, load)(chosen)
    assert load.sum() == 3000 and all(900 <= int(load[slot]) <= 1100 for slot in (0, 8, 16))


def test_choice_among_replicas_is_vllms() -> None:
    """Its kernel's formula, written out: the upper words of a token's number times 2^32 over the golden ratio."""
    _, parts, held = balanced(4)
    placement = sum(held, [])
    to_slots, replicas = maps(placement)
    chosen = torch.randint(EXPERTS, (50, 2), generator=generator(9))
    slots = slots_of(parts[0], placement, torch.zeros(12, dtype=torch.int32))(chosen)
    for token, experts in enumerate(chosen.tolist()):
        for choice, expert in enumerate(experts):
            replica = (token * 2654435769 & 0xFFFFFFFF) % int(replicas[expert])
            assert int(slots[token, choice]) == int(to_slots[expert, replica])


def test_codes_and_scales_move_as_bytes() -> None:
    part = torch.nn.Module()
    part.w13 = torch.nn.Parameter(torch.zeros(3, 4, 2).to(torch.float8_e4m3fn), requires_grad=False)
    part.w13_scale = torch.nn.Parameter(torch.zeros(3, 4, 1, dtype=torch.uint8), requires_grad=False)
    part.w2 = torch.nn.Parameter(torch.zeros(3, 2, 4, dtype=torch.bfloat16), requires_grad=False)
    experts: Any = part
    found = ExpertSlots(experts).get_expert_weights()
    assert [(tuple(t.shape), t.dtype) for t in found] == [
        ((3, 4, 2), torch.uint8),
        ((3, 4, 1), torch.uint8),
        ((3, 2, 4), torch.bfloat16),
    ]
    assert found[0].data_ptr() == part.w13.data_ptr()


def test_vllm_takes_it_for_a_model_to_balance_once_it_says_so() -> None:
    from vllm.model_executor.models.interfaces import is_mixture_of_experts

    model = BalancedModel()
    assert not is_mixture_of_experts(model)
    layers: Any = [SimpleNamespace(), SimpleNamespace()]
    model.announce_experts(layers, experts=8, redundant=4, ranks=3)
    assert is_mixture_of_experts(model)
    assert (model.num_physical_experts, model.num_local_physical_experts, model.num_redundant_experts) == (12, 4, 4)
