"""Section `entry.grammar`: what answers must look like is checked before an engine is asked."""

from typing import Literal

from deepinfer_router.section import BaseModel, ConfigDict, Field


class GrammarConfig(BaseModel):
    """JSON Schemas, regular expressions and grammars of requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: bool = Field(default=True, description="Whether to check them here.")
    backend: Literal["auto", "guidance"] = Field(
        default="auto",
        description="The engines' structured-outputs backend. guidance reads grammars as the entry does, so what the "
        "entry cannot read is refused; otherwise only what xgrammar refuses too.",
    )
    max_bytes: int = Field(default=1 << 16, ge=256, description="Of one schema, expression or grammar.")
    compile_s: float = Field(default=1.0, gt=0, le=60, description="What reading one may take.")
    memory_bytes: int = Field(default=1 << 31, ge=1 << 28, description="Address space of the process that reads them.")
    wait_s: float = Field(default=2.0, gt=0, le=60, description="For others' turns; then it goes to the engine unread.")
    remembered: int = Field(default=4096, ge=0, description="Verdicts.")
