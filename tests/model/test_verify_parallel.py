"""Which ways of running several processes are refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.config.parallel import EPLBConfig

from deepinfer_vllm.models.deepseek_v41.verify_parallel import problems
from small_model import both_configs


def found(model: dict[str, Any] | None = None, **flags: Any) -> list[str]:
    """For the small model: 4 heads in 2 groups, 8 experts of width 16, one shared expert."""
    config, _ = both_configs(**(model or {}))
    parallel = ParallelConfig()
    for name, value in flags.items():  # past vLLM's own checks, of which a GPU has others
        assert hasattr(parallel, name)
        setattr(parallel, name, value)
    return problems(config, parallel)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 8},
        {"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": True},
        {"data_parallel_size": 3, "enable_expert_parallel": True},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True},
    ],
    ids=str,
)
def test_what_runs(flags: dict[str, Any]) -> None:
    assert found(**flags) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size=4 (must be a divisor of o_groups=2)"),
        (
            {"data_parallel_size": 3},
            "--tensor-parallel-size=1 times --data-parallel-size=3 (must divide moe_intermediate_size=16, "
            "or --enable-expert-parallel be on)",
        ),
        (
            {"data_parallel_size": 9, "enable_expert_parallel": True},
            "--enable-expert-parallel=True over 9 processes (must be over at most n_routed_experts=8)",
        ),
        (
            {"pipeline_parallel_size": 2},
            "--pipeline-parallel-size=2 (must be 1: each KV group's layers (1, 2-4) read one layer's rows, "
            "which no stage hands on)",
        ),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size=2 (must be 1)"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size=2 (must be 1)"),
        ({"enable_dbo": True}, "--enable-dbo=True (must be off)"),
        ({"ubatch_size": 2}, "--ubatch-size=2 (must be at most 1)"),
    ],
    ids=str,
)
def test_what_does_not(flags: dict[str, Any], message: str) -> None:
    assert found(**flags) == [message]


def test_a_shared_expert_that_cannot_be_split() -> None:
    assert found({"moe_intermediate_size": 15}, tensor_parallel_size=2, enable_expert_parallel=True) == [
        "--tensor-parallel-size=2 (must be a divisor of the shared expert's width 15)"
    ]
    assert (
        found({"moe_intermediate_size": 15, "n_shared_experts": 0}, tensor_parallel_size=2, enable_expert_parallel=True)
        == []
    )


def test_redundant_experts_that_do_not_fill_the_ranks() -> None:
    flags: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    assert found(**flags, eplb_config=EPLBConfig(num_redundant_experts=2)) == []
    assert found(**flags, eplb_config=EPLBConfig(num_redundant_experts=3)) == [
        "--eplb-config.num_redundant_experts=3 (must be such that n_routed_experts=8 and they are a multiple of 2 "
        "processes)"
    ]
