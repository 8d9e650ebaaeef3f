"""One engine as a configuration names it."""

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from deepinfer_router.roles import Role
from deepinfer_router.section import BaseModel, ConfigDict, Field, field_validator, model_validator

_HOST = re.compile(r"[A-Za-z0-9._-]+\Z|[0-9A-Fa-f:.]+\Z")


class EngineConfig(BaseModel):
    """An engine's address and what it is there for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="http://HOST:PORT of the engine, or HOST:PORT.")
    id: str = Field(default="", description="Its name in metrics and on the status page. Default: HOST:PORT.")
    roles: tuple[Role, ...] = Field(
        default=(Role.PREFILL, Role.DECODE), min_length=1, description="What it does: prefill, decode, encode."
    )
    models: tuple[str, ...] = Field(default=(), description="Names of models that it serves. Empty: any.")
    ranks: int = Field(default=1, ge=1, le=1024, description="Data-parallel ranks behind the one address.")
    capacity_tokens: int | None = Field(
        default=None, ge=1, description="KV tokens that a rank has room for. Default: what the engine's metrics say."
    )

    engine_class: str = Field(
        default="", description="Engines of one class cost the same: hardware, model and parallelism, in your words."
    )

    @field_validator("url")
    @classmethod
    def _only_an_address(cls, url: str) -> str:
        whole = url if "://" in url else f"http://{url}"
        parts = urlsplit(whole)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if (
            parts.scheme not in ("http", "https")
            or not _HOST.match(parts.hostname or "")
            or port == 0
            or parts.username
        ):
            raise ValueError("must be http://HOST:PORT, as http://10.0.0.7:8000")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError("must end after the port: paths are the requests'")
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        return f"{parts.scheme}://{host}:{port or (443 if parts.scheme == 'https' else 80)}"

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        return {"url": data} if isinstance(data, str) else data

    @property
    def name(self) -> str:
        """`id`, or what stands for it."""
        return self.id or self.url.partition("://")[2]

    def plain(self) -> dict[str, Any]:
        """What a worker is told of it: an EngineSpec of plain types."""
        return {
            "url": self.url,
            "id": self.name,
            "roles": [str(role) for role in self.roles],
            "models": list(self.models),
            "ranks": self.ranks,
            "capacity_tokens": self.capacity_tokens,
            "engine_class": self.engine_class,
        }


def names_differ(engines: Sequence[EngineConfig]) -> None:
    """Raises ValueError: two have the same name."""
    names = [engine.name for engine in engines]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"engines: {twice!r} is named twice: give each its own address, or an id")
