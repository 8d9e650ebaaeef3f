"""Section `entry.recipe`: conversations encoded here, as DeepSeek's API encodes them."""

from pathlib import Path

from deepinfer_router.section import BaseModel, ConfigDict, Field


class RecipeConfig(BaseModel):
    """What deepseek-recipe encodes with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokenizer: Path | None = Field(default=None, description="The model's tokenizer.json, or its directory.")
    models: tuple[str, ...] = Field(default=(), description="Models that are encoded here; empty: all.")
    thinking: bool = Field(default=True, description="Whether a request that does not say thinks first.")
    threads: int = Field(default=2, ge=1, le=64, description="Threads that encode, beside the event loop.")
    cache_bytes: int = Field(default=64 << 20, ge=0, description="Of texts, and their tokens, that are remembered.")
