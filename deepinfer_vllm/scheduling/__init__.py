"""Prefill chunks by what they cost: `--scheduler-cls deepinfer_vllm.scheduling.CostModelScheduler`."""

from typing import Any

NAME = "deepinfer_vllm.scheduling.CostModelScheduler"


def __getattr__(name: str) -> Any:
    if name != "CostModelScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepinfer_vllm.scheduling.scheduler import CostModelScheduler  # loads vLLM

    return CostModelScheduler
