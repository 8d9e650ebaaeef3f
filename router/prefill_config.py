"""Settings of the prefill balancer."""

from itertools import pairwise
from pathlib import Path
from typing import Literal

from deepinfer_router.section import BaseModel, ConfigDict, Field, field_validator

MAX_GROUPS = 32


class PrefillConfig(BaseModel):
    """Section `prefill`. Defaults follow the four groups that DeepSeek names; docs/router.md says when others pay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pools: bool = Field(
        True,
        description="Groups of engines by context length. off: one pool, least work left; better where engines have one"
        " rank each and cut chunks by predicted time.",
    )
    pools_where_decoding: bool = Field(
        False,
        description="Groups also of engines that decode what they prefill. These then decode unequally: most requests"
        " are short, and few engines prefill them.",
    )
    edges_tokens: tuple[int, ...] = Field(
        (16_384, 65_536, 262_144),
        max_length=MAX_GROUPS - 1,
        description="Where the next group begins, by tokens of the whole prompt, cached ones included; increasing.",
    )
    overflow: Literal["none", "up", "up_and_idle"] = Field(
        "up_and_idle",
        description="none: every group waits for its own engines, which keeps short prompts' worst case low. up: short"
        " work may go to engines of longer groups when they finish it sooner. up_and_idle: and long work to engines of"
        " shorter groups where two or more have nothing to do; lowest mean.",
    )
    overflow_wait_s: float = Field(
        0.3, ge=0, le=3600, description="Shorter waits than this, or than twice the own cost, never overflow."
    )
    overflow_gain: float = Field(
        0.2, ge=0, le=1, description="The other engine's wait is at most this fraction of the wait in the own group."
    )
    choices: int = Field(
        0,
        ge=0,
        le=64,
        description="Compare so many random engines instead of all: 4 where several routers that do not share counts"
        " serve one fleet. 0: all.",
    )
    max_pending_s: float | None = Field(
        10.0,
        gt=0,
        description="With more predicted work than this, and than its own, at all targets that may take it, a request"
        " waits in the router, where tenants get fair shares, and not in an engine's queue. null: no bound.",
    )
    epoch_s: float = Field(20.0, gt=0, le=3600, description="Demand is measured, and engines moved, this often.")
    demand_smoothing: float = Field(0.4, gt=0, le=1, description="Weight of the last epoch in the measured demand.")
    dead_band_engines: float = Field(
        0.5, ge=0, le=8, description="An engine moves only if both groups are further than this from their shares."
    )
    dwell_epochs: int = Field(3, ge=0, le=1000, description="A moved engine stays at least so many epochs.")
    max_moved_fraction: float = Field(
        0.05, ge=0, le=1, description="Of the engines, at most this fraction moves in an epoch, but two may."
    )
    freeze_unhealthy_fraction: float = Field(
        0.2, ge=0, le=1, description="No moves while more than this fraction of the engines cannot be sent to."
    )
    first_cut_requests: int = Field(
        64, ge=1, description="All engines are one pool until so many requests have shown what the traffic is."
    )
    costs_file: Path | None = Field(
        None,
        description="JSON table of cost coefficients by kind of engine; its set `default` is for all others. What was"
        " learnt is `costs` of the admin port's /status, in the same form.",
    )
    fit: bool = Field(True, description="Correct the coefficients of each kind from observed times to first byte.")

    @field_validator("edges_tokens")
    @classmethod
    def _increasing(cls, edges: tuple[int, ...]) -> tuple[int, ...]:
        if any(edge < 1 for edge in edges) or any(a >= b for a, b in pairwise(edges)):
            raise ValueError("must be positive and increasing, as in 16384, 65536, 262144")
        return edges

    @property
    def group_names(self) -> tuple[str, ...]:
        """As people write them: <16K, 16K-64K, 64K-256K, >=256K. Without edges or pools there is one, `all`."""
        if not self.pools or not self.edges_tokens:
            return ("all",)
        edges = [f"{edge >> 10}K" if edge % 1024 == 0 else str(edge) for edge in self.edges_tokens]
        return (f"<{edges[0]}", *(f"{low}-{high}" for low, high in pairwise(edges)), f">={edges[-1]}")
