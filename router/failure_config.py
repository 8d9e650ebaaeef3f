"""What is done about engines that fail while they have a request."""

from deepinfer_router.section import BaseModel, ConfigDict, Field


class FailureConfig(BaseModel):
    """Section `failure`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_timeout_s: float = Field(
        3600.0, gt=0, description="A request whose client gives no deadline has this long until its answer begins."
    )
    first_token_s: float = Field(
        120.0, gt=0, description="The least time that a stream's first token may take, however short it is predicted."
    )
    first_token_factor: float = Field(
        3.0, ge=1, description="Otherwise it may take so many times as long as predicted."
    )
    stall_s: float = Field(
        15.0, gt=0, description="Silence within a stream after which its engine counts as failed. Of all models."
    )
    model_stall_s: dict[str, float] = Field(default_factory=dict, description="The same, for models by name.")
    resume: bool = Field(
        False,
        description="Go on with a stream on another engine when its own fails. Costs the parsing of each event; "
        "a request may ask for it, or not, with the header x-resume: true or false.",
    )
    max_resumes: int = Field(2, ge=1, le=8, description="How often one stream may go on on another engine.")

    def stall_of(self, model: str) -> float:
        """Seconds of silence that are too many for `model`."""
        return self.model_stall_s.get(model, self.stall_s)
