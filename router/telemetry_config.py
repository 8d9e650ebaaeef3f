"""Traces and the access log."""

from pathlib import Path

from deepinfer_router.section import BaseModel, ConfigDict, Field


class TracingConfig(BaseModel):
    """W3C trace contexts are always passed on. Spans of the router itself are sent where an endpoint is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str = Field(
        default="", pattern=r"^(https?://.+)?$", description="OTLP over HTTP, as http://collector:4318/v1/traces."
    )
    headers: dict[str, str] = Field(default={}, repr=False, description="Sent with every export.")
    service_name: str = Field(default="deepinfer-router", min_length=1, description="`service.name` of the spans.")
    sample_ratio: float = Field(
        default=0.01, ge=0, le=1, description="Share of requests without a traceparent that are traced."
    )
    max_spans: int = Field(default=4096, ge=1, description="Spans that wait for export; more are dropped and counted.")
    interval_s: float = Field(default=2.0, gt=0, description="Between two exports.")


class AccessLogConfig(BaseModel):
    """A line of JSON a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = Field(default=None, description="Where to append; /dev/stdout works. Default: no log.")
    sample_ratio: float = Field(default=1.0, gt=0, le=1, description="Share of requests that succeed and are logged.")
    max_lines: int = Field(default=20000, ge=1, description="Lines that wait to be written; more are dropped, counted.")
    interval_s: float = Field(default=0.5, gt=0, description="Between two writes.")
