"""Configuration of engines' health and of how their load is seen."""

from deepinfer_router.section import BaseModel, ConfigDict, Field


class FleetConfig(BaseModel):
    """Section `fleet`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults_to_open: int = Field(default=3, ge=1, description="Faults in a row that open an engine's circuit.")
    fault_memory_s: float = Field(
        default=10.0, gt=0, description="A fault counts for this long; each success takes a quarter."
    )
    backoff_first_s: float = Field(default=1.0, gt=0, description="How long a circuit stays open the first time.")
    backoff_most_s: float = Field(default=30.0, gt=0, description="Each further time doubles it up to this.")
    slow_start_s: float = Field(
        default=30.0, ge=0, description="A new or recovered engine's share grows for this long."
    )
    pressure_memory_s: float = Field(
        default=30.0, gt=0, description="429 and 503 bound an engine's requests at most this long."
    )
    probe_s: float = Field(default=5.0, gt=0, description="Time between probes of an engine that is well.")
    probe_soon_s: float = Field(default=1.0, gt=0, description="Time between probes of one that starts, or had faults.")
    probe_timeout_s: float = Field(default=3.0, gt=0, description="A probe or poll that takes longer has failed.")
    probe_path: str = Field(default="/health", pattern="^/", description="What a probe asks for.")
    standstill_s: float = Field(
        default=120.0,
        gt=0,
        description="An engine with requests whose own counters stand still for so long is stuck, whatever it answers "
        "to probes. Longer than its longest prefill: counters move when an answer does.",
    )
    poll_s: float | None = Field(
        default=None,
        gt=0,
        description="Time between polls of an engine's /metrics, which one worker does for all of a host. Default: 1, "
        "with routers on several hosts 0.2; more with more than some hundred engines.",
    )
    poll_path: str = Field(default="/metrics", pattern="^/", description="What a poll asks for.")
    stale_s: float = Field(default=5.0, gt=0, description="A poll says nothing any more after so long.")
