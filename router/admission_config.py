"""Settings of the queue before the engines."""

from deepinfer_router.section import BaseModel, ConfigDict, Field, field_validator


class AdmissionConfig(BaseModel):
    """Section `admission`. Requests wait here only while no engine has room for them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_waiting: int = Field(4096, ge=0, description="Requests that may wait; more are answered 429. 0: none waits.")
    max_waiting_of_a_tenant: int = Field(1024, ge=0, description="How many of those may be of one tenant.")
    max_waiting_cost_s: float = Field(
        3600.0, gt=0, description="Seconds of predicted prefill that may wait, all requests together; more are a 429."
    )
    max_wait_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="After waiting so long, and three times what its own prefill takes, a request is answered 429.",
    )
    hold_after_s: float = Field(
        10.0,
        ge=0,
        description="One that nothing has had room for so long is overtaken no more by later ones of its kind.",
    )
    tenant_weights: dict[str, float] = Field(
        default_factory=dict, description="Shares of tenants that are not 1: one with 2 gets twice as much."
    )
    max_retry_after_s: float = Field(60.0, ge=1, le=3600, description="Longest Retry-After that a client is given.")

    @field_validator("tenant_weights")
    @classmethod
    def _positive(cls, weights: dict[str, float]) -> dict[str, float]:
        for tenant, weight in weights.items():
            if not 1e-3 <= weight <= 1e3:
                raise ValueError(f"tenant_weights[{tenant!r}] = {weight} is not in 0.001..1000")
        return weights
