"""Section `identity`: who may ask, for what, and what the router says of them to engines and store."""

import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Literal

from deepinfer_router.errors import RouterConfigError
from deepinfer_router.section import BaseModel, ConfigDict, Field, field_validator, model_validator

TtlClass = Literal["agent", "chat", "none"]
CACHE_SALT = r"[^@/\\\x00]{1,128}"
"""What vLLM takes."""
Header = Literal["tenant", "ttl_class", "cache_salt", "priority"]


class Grant(BaseModel):
    """What holds for a request: of one API key, or of all where there are none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: str = Field(
        default="", max_length=128, description="For fair queueing, and the tag of what the store keeps."
    )
    ttl_class: TtlClass | None = Field(
        default=None,
        description="How long the store keeps what is computed: its classes. Default: by route, or its default.",
    )
    priority: int = Field(default=0, description="Smaller is sooner.")
    cache_salt: str | None = Field(
        default=None,
        pattern=rf"\A{CACHE_SALT}\z",
        description="Keeps cached prefixes apart from other salts'.",
    )
    models: tuple[str, ...] = Field(default=(), description="Models that may be asked for; empty: all.")
    requests_per_minute: float | None = Field(
        default=None, gt=0, description="Requests; as many at once after a pause."
    )
    tokens_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Of prompts, as estimated when they come, and of answers, once they are counted.",
    )
    max_concurrent: int | None = Field(default=None, ge=1, description="Requests at the same time.")
    may_set: tuple[Header, ...] = Field(
        default=(),
        description="What the client may decide itself, by headers: x-tenant, x-ttl-class, x-cache-salt; its priority "
        "also by the body. What it says of the others is left out.",
    )


class ApiKey(Grant):
    """One API key. Its text is kept as a SHA-256 digest only; exactly one of `sha256`, `env`, `file` says it."""

    name: str = Field(min_length=1, description="In logs and metrics instead of the key.")
    sha256: str | None = Field(default=None, description="Its digest, 64 hexadecimal digits.")
    env: str | None = Field(default=None, description="Environment variable that holds the key.")
    file: Path | None = Field(default=None, description="File that holds the key alone.")

    @field_validator("sha256")
    @classmethod
    def _is_digest(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[0-9a-f]{64}", value):
            raise ValueError("must be 64 hexadecimal digits: printf %s KEY | sha256sum")
        return value

    @model_validator(mode="after")
    def _says_one(self) -> "ApiKey":
        if sum(one is not None for one in (self.sha256, self.env, self.file)) != 1:
            raise ValueError(f"key {self.name!r}: give one of sha256, env and file")
        return self

    def digest(self) -> bytes:
        """SHA-256 of the key, 32 bytes.

        Raises:
            RouterConfigError: its variable or file is not there, or empty.
        """
        if self.sha256 is not None:
            return bytes.fromhex(self.sha256)
        if self.env is not None:
            text = os.environ.get(self.env, "")
            place = f"environment variable {self.env}"
        else:
            assert self.file is not None
            place = str(self.file)
            try:
                text = self.file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise RouterConfigError(f"API key {self.name!r}: {place} cannot be read: {error}") from error
        if not text:
            raise RouterConfigError(f"API key {self.name!r}: {place} is empty: put the key there, or give its sha256")
        return sha256(text.encode()).digest()


class RouteTtl(BaseModel):
    """The TTL class of requests whose path begins so."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix: str = Field(pattern="^/", description="How paths begin: /v1/messages.")
    ttl_class: TtlClass = Field(description="Their class.")


class IdentityConfig(BaseModel):
    """Who may ask."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[ApiKey, ...] = Field(default=(), description="API keys; none: everybody may ask.")
    everybody: Grant = Field(default=Grant(may_set=("priority",)), description="What holds where there are no keys.")
    routes: tuple[RouteTtl, ...] = Field(
        default=(), description="TTL classes by path, for keys without one; the first counts."
    )
    engine_api_key_env: str | None = Field(
        default=None,
        description="Environment variable with the API key of the engines. A client's own is not sent on to them.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "IdentityConfig":
        names = [key.name for key in self.keys]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"keys: {', '.join(sorted(twice))} is there twice: names must differ")
        return self
