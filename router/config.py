"""The router's whole configuration: a section for each concept, each with defaults that work.

`config_source` reads it from a file and the command line.
"""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepinfer_router.discovery_config import DiscoveryConfig
from deepinfer_router.engine_config import EngineConfig
from deepinfer_router.process_config import AdminConfig, ProcessConfig
from deepinfer_router.roles import Role
from deepinfer_router.telemetry_config import AccessLogConfig, TracingConfig


class RouterConfig(BaseModel):
    """Everything that can be set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: str = Field(default="127.0.0.1:8080", description="HOST:PORT that clients ask.")
    engines: tuple[EngineConfig, ...] = Field(default=(), description="Engines, besides those that are discovered.")
    discovery: DiscoveryConfig = Field(default=DiscoveryConfig(), description="Where more engines are found.")
    process: ProcessConfig = Field(default=ProcessConfig(), description="Workers, and how they end.")
    admin: AdminConfig = Field(default=AdminConfig(), description="The second port, for people and monitors.")
    tracing: TracingConfig = Field(default=TracingConfig(), description="Spans.")
    access_log: AccessLogConfig = Field(default=AccessLogConfig(), description="A line a request.")

    @model_validator(mode="after")
    def _fits_together(self) -> "RouterConfig":
        names = [engine.name for engine in self.engines]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"engines: {twice!r} is named twice: give each its own address, or an id")
        if self.discovery.any:
            return self
        if not self.engines:
            raise ValueError("engines: none: list some, name a source below `discovery`, or use --engines")
        have = {role for engine in self.engines for role in engine.roles}
        for role in (Role.PREFILL, Role.DECODE):
            if role not in have:
                raise ValueError(
                    f"engines: none has the role {role}: a request needs one that prefills, one that decodes"
                )
        return self
