"""How the router runs as processes, and its second port for people and monitors."""

from deepinfer_router.section import BaseModel, ConfigDict, Field, SecretStr


class ProcessConfig(BaseModel):
    """Workers, and how they end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(default=1, ge=1, le=256, description="Processes that serve the port: one a core.")
    drain_s: float = Field(
        default=30.0, ge=0, description="After SIGTERM, how long requests under way may take before they are cut."
    )
    unready_s: float = Field(
        default=0.0, ge=0, description="After SIGTERM, how long to go on accepting while /ready already says no."
    )
    hung_s: float = Field(
        default=60.0, gt=0, description="A worker whose event loop has not answered for so long is killed and replaced."
    )


class AdminConfig(BaseModel):
    """The port of /metrics, /health, /ready, /status and the status page."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: str = Field(default="127.0.0.1:9401", description="HOST:PORT; empty: none.")
    token: SecretStr | None = Field(
        default=None, min_length=16, description="Bearer token that changes need. Default: only from loopback."
    )
