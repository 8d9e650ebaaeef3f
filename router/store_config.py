"""Section `store`: the KV store whose CHECK the router asks. Without it bodies pass as they come."""

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.host_port import host_port
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.section import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from deepinfer_kvstore.client import Address


class StoreConfig(BaseModel):
    """Where the store's daemon is, and what it may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    socket: Path | None = Field(default=None, description="Unix socket of the daemon on this host, or `address`.")
    address: str | None = Field(default=None, description="HOST:PORT of a daemon elsewhere.")
    token_env: str | None = Field(default=None, description="Environment variable with the daemon's token.")
    tls_ca: Path | None = Field(default=None, description="Certificate of the daemon's authority: TCP through TLS.")
    namespaces: dict[str, str] = Field(
        default={},
        description="The store's namespace, by the name of a model that clients ask for: `deepinfer kvstore stats` "
        "lists them. A model without one is looked for in the only namespace that there is.",
    )
    budget_s: float = Field(
        default=0.005,
        gt=0,
        le=1,
        description="Seconds of one question, without hashing; then the request goes on without.",
    )
    ticket_s: float = Field(default=30.0, ge=0, le=3600, description="How long what was found is kept for an engine.")
    connections: int = Field(default=4, ge=1, le=64, description="Connections to the daemon.")

    @model_validator(mode="after")
    def _says_where(self) -> "StoreConfig":
        if (self.socket is None) == (self.address is None):
            raise ValueError("give one of socket and address")
        if self.address is not None:
            try:
                host_port("address", self.address)
            except StoreConfigError as error:
                raise ValueError(str(error)) from error
        return self

    def where(self) -> "Address":
        """The daemon's address."""
        if self.socket is not None:
            return self.socket
        assert self.address is not None
        return host_port("address", self.address)

    def token(self) -> str:
        """Raises RouterConfigError: its variable is empty."""
        if self.token_env is None:
            return ""
        if token := os.environ.get(self.token_env):
            return token
        raise RouterConfigError(f"store.token_env: environment variable {self.token_env} is empty: put the token there")

    def tls(self) -> ssl.SSLContext | None:
        """Raises RouterConfigError: no certificate can be read."""
        if self.tls_ca is None:
            return None
        try:
            return ssl.create_default_context(cafile=str(self.tls_ca))
        except OSError as error:
            raise RouterConfigError(f"store.tls_ca: {self.tls_ca} cannot be read: {error}") from error
