"""Section `entry.grammar`: what answers must look like is checked before an engine is asked."""

from typing import Literal

from deepinfer_router.section import BaseModel, ConfigDict, Field


class GrammarConfig(BaseModel):
    """JSON Schemas, regular expressions and grammars of requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: bool = Field(
        default=True, description="Whether schemas, expressions and grammars are checked before engines."
    )
    backend: Literal["auto", "guidance"] = Field(
        default="auto",
        description="The engines' structured-outputs backend. guidance reads grammars as the entry does, so what the "
        "entry cannot read is refused; otherwise only what xgrammar refuses too.",
    )
    max_bytes: int = Field(default=1 << 16, ge=256, description="Size of one, at most: larger ones are refused.")
    compile_s: float = Field(
        default=1.0, gt=0, le=60, description="Seconds that reading one may take, else it is refused."
    )
    memory_bytes: int = Field(default=1 << 31, ge=1 << 28, description="Address space of the process that reads.")
    wait_s: float = Field(default=2.0, gt=0, le=60, description="Seconds to wait for its turn; then it goes on unread.")
    remembered: int = Field(default=4096, ge=0, description="Verdicts that are remembered.")
