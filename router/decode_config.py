"""Configuration of decode balancing."""

from deepinfer_router.section import BaseModel, ConfigDict, Field


class DecodeConfig(BaseModel):
    """Section `decode`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_weight: float = Field(
        default=3.4e-4,
        ge=1e-6,
        le=0.1,
        description="How many requests one KV token weighs: c/b where a step takes a + b*requests + c*KV tokens.",
    )
    kv_share: float = Field(
        default=0.9, gt=0, le=1, description="Share of an engine's KV capacity that may be promised."
    )
    full_scan_most: int = Field(
        default=512, ge=1, description="Of more targets than this a few are drawn and compared."
    )
    choices: int = Field(
        default=2, ge=2, le=64, description="How many are drawn for a request of mean size; for larger ones more."
    )
    replicas: int = Field(
        default=1,
        ge=1,
        description="Routers on other hosts in front of the same engines, this one included. They see each other only "
        "by polls, so all would choose the same engine: of several each compares a few that it draws.",
    )
    fit_kv_weight: bool = Field(
        default=False,
        description="Fit kv_weight to what engines say tokens take, up to 4 times more or less. For engines that only "
        "decode: beside prefill it would be fitted to that.",
    )
