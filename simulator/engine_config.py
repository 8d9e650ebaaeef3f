"""What a mock engine is like: its size and its speed."""

from dataclasses import dataclass
from typing import Literal

from deepinfer_costmodel.cost import Cost


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Defaults: an engine without latency that is never full."""

    models: tuple[str, ...] = ("mock",)
    ranks: int = 1
    """Data-parallel; each has its own capacity and cache."""
    capacity_tokens: int = 1 << 22
    """KV tokens a rank holds."""
    block_tokens: int = 16
    max_sequences: int = 1024
    """Running at once in a rank."""
    max_waiting: int | None = None
    """More are refused with 503, as vLLM's queue overflow; None: never."""
    max_model_tokens: int = 1 << 21
    default_max_tokens: int = 16
    """Where a request names none."""
    end_every: int = 0
    """An answer ends by itself after so many tokens on average; 0: only at its limit."""
    prefill: Cost = Cost(0.020, 57e-6, 4.4e-9)
    """Seconds of a prompt's computation."""
    step_s: float = 0.0106
    """A decode step: this, plus the next for each running request, plus the one after for each KV token they hold."""
    step_request_s: float = 105e-6
    step_token_s: float = 3.55e-8
    time_scale: float = 0.0
    """All latencies times this. 0: as fast as this process can."""
    connector: Literal["none", "nixl", "mooncake"] = "none"
    lease_s: float = 30.0
    """How long computed blocks wait for a decode engine (Mooncake: 480 s in vLLM)."""
