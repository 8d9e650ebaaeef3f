"""What the data path may take of memory and time, and its TLS: the section `http` of the configuration."""

import ssl
from pathlib import Path

from deepinfer_router.errors import RouterConfigError
from deepinfer_router.section import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(_Section):
    """What clients, together or one of them, may take."""

    max_body_bytes: int = Field(default=64 << 20, ge=1, description="Of one request, decompressed. More: 413.")
    max_buffered_bytes: int = Field(
        default=1 << 30,
        ge=1,
        description="Of all bodies that take more than one read, or are compressed, of a worker, at a time. More: 503.",
    )
    max_header_bytes: int = Field(
        default=32 << 10, ge=1024, description="Request line and headers together. More: 431."
    )
    max_headers: int = Field(default=100, ge=1, description="Header lines. More: 431.")
    max_connections: int = Field(
        default=50_000, ge=1, description="Open at a time in a worker. More are closed at once."
    )
    head_timeout_s: float = Field(
        default=10.0, gt=0, description="From a request's first byte to the end of its headers: 408."
    )
    body_timeout_s: float = Field(default=300.0, gt=0, description="From there to the end of its body: 408.")
    keep_alive_s: float = Field(default=75.0, gt=0, description="Between two requests of a connection.")
    write_stall_s: float = Field(default=120.0, gt=0, description="A client that takes no byte for so long is left.")
    half_close: bool = Field(
        default=False,
        description="A client that shuts its sending side still gets its answer. Off, that counts as leaving, "
        "since closing a socket looks the same.",
    )


class Timeouts(_Section):
    """How long engines may take."""

    connect_s: float = Field(default=1.0, gt=0, description="For a connection, TLS included.")
    first_byte_s: float | None = Field(
        default=None, gt=0, description="From a request to the head of its answer; null: none."
    )
    idle_s: float = Field(
        default=4.0,
        gt=0,
        description="A connection unused for so long is closed; below the 5 s after which uvicorn does.",
    )
    coalesce_s: float = Field(
        default=0.002,
        ge=0,
        le=1,
        description="A stream that comes in bursts of pieces is left unread for at most so long, so that more of them"
        " go on together. 0: never.",
    )


class ServerTls(_Section):
    """TLS towards clients."""

    certificate: Path = Field(description="PEM, the chain included.")
    key: Path | None = Field(default=None, description="PEM; null: in the certificate's file.")
    client_ca: Path | None = Field(default=None, description="Clients must show a certificate signed by one of these.")

    def context(self) -> ssl.SSLContext:
        """Of the listener; TLS 1.2 or newer. Raises RouterConfigError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load_chain(context, "http.tls", self.certificate, self.key)
        if self.client_ca:
            _load_ca(context, "http.tls.client_ca", self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """Certificate and key of `context` are read again, for connections from now on. Raises RouterConfigError."""
        _load_chain(context, "http.tls", self.certificate, self.key)


class EngineTls(_Section):
    """TLS towards engines whose URL is https://."""

    ca: Path | None = Field(default=None, description="Authorities to trust; null: the system's.")
    certificate: Path | None = Field(default=None, description="PEM, shown to engines that ask for one.")
    key: Path | None = Field(default=None, description="PEM; null: in the certificate's file.")
    verify: bool = Field(default=True, description="Off: any certificate is taken.")
    server_name: str | None = Field(default=None, description="Name to expect; null: the URL's host.")

    def context(self) -> ssl.SSLContext:
        """Of connections to engines; TLS 1.2 or newer. Raises RouterConfigError."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca:
            _load_ca(context, "http.engine_tls.ca", self.ca)
        if self.certificate:
            _load_chain(context, "http.engine_tls", self.certificate, self.key)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class HttpConfig(_Section):
    """Section `http`."""

    limits: Limits = Field(default=Limits(), description="Towards clients.")
    tls: ServerTls | None = Field(default=None, description="Null: plain HTTP.")
    timeouts: Timeouts = Field(default=Timeouts(), description="Towards engines.")
    engine_tls: EngineTls = Field(default=EngineTls(), description="Of engines at https:// URLs.")


def _load_chain(context: ssl.SSLContext, where: str, certificate: Path, key: Path | None) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise RouterConfigError(
            f"{where}: certificate {certificate} with key {key or certificate}: {error}; give PEM files that match"
        ) from error


def _load_ca(context: ssl.SSLContext, where: str, file: Path) -> None:
    try:
        context.load_verify_locations(file)
    except (OSError, ssl.SSLError) as error:
        raise RouterConfigError(f"{where}: {file}: {error}; give a PEM file of certificates") from error
