"""The router's whole configuration: a section for each concept, each with defaults that work.

`config_source` reads it from a file and the command line.
"""

from typing import Any

from deepinfer_router.admission_config import AdmissionConfig
from deepinfer_router.autoscale_config import AutoscaleConfig
from deepinfer_router.decode_config import DecodeConfig
from deepinfer_router.disaggregation_config import DisaggregationConfig
from deepinfer_router.discovery_config import DiscoveryConfig
from deepinfer_router.engine_config import EngineConfig, names_differ
from deepinfer_router.entry_config import EntryConfig
from deepinfer_router.failure_config import FailureConfig
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.http_config import HttpConfig
from deepinfer_router.identity_config import IdentityConfig
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.process_config import AdminConfig, ProcessConfig
from deepinfer_router.roles import Role
from deepinfer_router.section import BaseModel, ConfigDict, Field, model_validator
from deepinfer_router.store_config import StoreConfig
from deepinfer_router.telemetry_config import AccessLogConfig, TracingConfig

HOT = ("engines", "identity")
"""Sections that a reload changes; the others wait for a restart."""


class RouterConfig(BaseModel):
    """Everything that can be set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: str = Field(default="127.0.0.1:8080", description="HOST:PORT that clients ask.")
    engines: tuple[EngineConfig, ...] = Field(default=(), description="Engines, besides those that are discovered.")
    discovery: DiscoveryConfig = Field(
        default=DiscoveryConfig.model_validate({}), description="Where more engines are found."
    )
    process: ProcessConfig = Field(default=ProcessConfig.model_validate({}), description="Workers, and how they end.")
    admin: AdminConfig = Field(default=AdminConfig.model_validate({}), description="The port of metrics and status.")
    http: HttpConfig = Field(
        default=HttpConfig.model_validate({}), description="Limits, timeouts and TLS of both sides."
    )
    entry: EntryConfig = Field(default=EntryConfig.model_validate({}), description="How requests are read.")
    identity: IdentityConfig = Field(
        default=IdentityConfig.model_validate({}), description="Who may ask, and for what."
    )
    fleet: FleetConfig = Field(default_factory=FleetConfig, description="Engines' health and load.")
    store: StoreConfig | None = Field(default=None, description="Whom to ask for cached prefixes. Default: nobody.")
    prefill: PrefillConfig = Field(default=PrefillConfig.model_validate({}), description="Which engine prefills.")
    decode: DecodeConfig = Field(default=DecodeConfig.model_validate({}), description="Which engine decodes.")
    admission: AdmissionConfig = Field(
        default=AdmissionConfig.model_validate({}), description="Where requests wait for room."
    )
    disaggregation: DisaggregationConfig = Field(
        default=DisaggregationConfig.model_validate({}), description="How requests are split between engines."
    )
    autoscale: AutoscaleConfig = Field(
        default=AutoscaleConfig.model_validate({}), description="How many engines are recommended."
    )
    failure: FailureConfig = Field(default=FailureConfig.model_validate({}), description="When an engine fails.")
    tracing: TracingConfig = Field(default=TracingConfig.model_validate({}), description="Spans.")
    access_log: AccessLogConfig = Field(default=AccessLogConfig.model_validate({}), description="A line a request.")

    @model_validator(mode="after")
    def _fits_together(self) -> "RouterConfig":
        names_differ(self.engines)
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

    def plain_engines(self) -> list[dict[str, Any]]:
        """The listed engines, as workers are told of them."""
        return [engine.plain() for engine in self.engines]

    def fixed_differences(self, other: "RouterConfig") -> list[str]:
        """Names of sections that differ and are not `HOT`."""
        return [
            name for name in type(self).model_fields if name not in HOT and getattr(self, name) != getattr(other, name)
        ]
