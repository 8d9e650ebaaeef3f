"""How requests are split between engines that prefill, decode and encode images."""

from typing import Literal

from deepinfer_router.section import BaseModel, ConfigDict, Field


class DisaggregationConfig(BaseModel):
    """Section `disaggregation`. It matters where some engine lacks one of the roles prefill and decode."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    connector: Literal["store", "nixl", "mooncake"] = Field(
        "store",
        description="How KV gets from a prefill to a decode engine. store: DeepInfer3FSConnector; nixl: any connector "
        "whose prefill answers with kv_transfer_params; mooncake: both engines are asked at once.",
    )
    local_tokens: int = Field(
        256,
        ge=0,
        description="A decode engine computes a prompt itself of which no more tokens than this are not cached.",
    )
    mooncake_bootstrap_port: int = Field(
        8998, ge=1, le=65535, description="Port of a prefill engine's Mooncake bootstrap server, on the engine's host."
    )
    encode_reuse: int = Field(
        4096, ge=0, description="Images whose encoding is remembered, and not asked for again; 0: none."
    )
    encode_reuse_s: float = Field(60.0, gt=0, description="How long an image's encoding is remembered.")
