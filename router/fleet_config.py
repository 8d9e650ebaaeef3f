"""Configuration of engines' health and of how their load is seen."""

from pydantic import BaseModel, ConfigDict, Field


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
