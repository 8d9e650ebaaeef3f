"""Settings of the recommendations for autoscaling."""

from deepinfer_router.autoscale_stage import Limits
from deepinfer_router.section import BaseModel, ConfigDict, Field


class AutoscaleConfig(BaseModel):
    """Section `autoscale`. The router recommends; something else, which knows the cluster, starts and stops engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_utilisation: float = Field(
        0.7, gt=0, le=1, description="How busy engines are to be: what is predicted to arrive, of what they can do."
    )
    sequences_per_rank: float = Field(
        64.0, gt=0, description="Requests that a decode rank is to have at once when it is fully used."
    )
    quota_utilisation: float = Field(
        0.8, gt=0, le=1, description="Nothing is taken away while more than this of what the engines can do is in use."
    )
    startup_s: float = Field(
        300.0, ge=0, le=86_400, description="Until a new engine serves. A demand that grows is taken so far ahead."
    )
    spare_fraction: float = Field(
        0.05, ge=0, le=1, description="Engines above the need, for those that fail while others start; at least one."
    )
    down_after_s: float = Field(
        300.0, ge=0, le=86_400, description="One engine less at most this often, and by the highest need in this time."
    )
    backlog_s: float = Field(60.0, gt=0, description="In how many seconds what waits now is to be worked off.")
    smoothing_s: float = Field(30.0, gt=0, description="Time over which arriving work is averaged.")
    min_engines: int = Field(1, ge=0, description="Of each stage, never fewer.")
    max_engines: int | None = Field(None, ge=1, description="Of each stage, never more; null: no limit.")

    def limits(self) -> Limits:
        """Of plain types."""
        return Limits(**self.model_dump())
