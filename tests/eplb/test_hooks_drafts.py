"""A router of vLLM's in a layer that EPLB does not know, as those of DSpark's draft are: it routes as without EPLB."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.distributed.eplb.eplb_state import EplbLayerState
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from deepinfer_vllm.compat.eplb_drafts import let_drafts_stay


class FirstTwo(BaseRouter):
    """Routes every token to experts 1 and 0."""

    routing_method_type = None

    def _compute_routing(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.ones(len(hidden_states), 2), torch.tensor([1, 0]).expand(len(hidden_states), 2)


@pytest.fixture(autouse=True)
def hooked() -> None:
    let_drafts_stay()
    let_drafts_stay()


def route(state: EplbLayerState | None) -> Any:
    router: Any = FirstTwo(top_k=2, global_num_experts=4, eplb_state=state)
    return router._select_experts(torch.zeros(3, 8), torch.zeros(3, 4))[1].tolist()


def test_unregistered_layers_route_as_without_eplb() -> None:
    assert route(EplbLayerState()) == route(None) == [[1, 0]] * 3


def test_half_a_state_is_still_refused() -> None:
    with pytest.raises(ValueError, match="EPLB requires"):
        route(EplbLayerState(expert_load_view=torch.zeros(4)))
