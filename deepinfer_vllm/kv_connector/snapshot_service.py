"""An engine's snapshots, and its part in sharing them with other nodes."""

import ssl
from collections import Counter
from typing import NamedTuple

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.host_port import host_port
from deepinfer_kvstore.snapshot_exchange import SnapshotExchange
from deepinfer_kvstore.snapshot_peers import CALL_SECONDS, SnapshotPeers
from deepinfer_kvstore.snapshot_server import SnapshotServer
from deepinfer_kvstore.snapshots import SnapshotRing
from deepinfer_vllm.kv_connector.config import ConnectorConfig


class Sharing(NamedTuple):
    """What a node needs to share snapshots with others."""

    directory: str
    host: str
    port: int
    token: str
    ours: ssl.SSLContext | None
    """What our server shows."""
    theirs: ssl.SSLContext | None
    """What we want to see of others'."""

    @classmethod
    def read(cls, config: ConnectorConfig) -> "Sharing | None":
        """None where nothing is shared.

        Raises:
            StoreConfigError: options that do not go together, or a file that cannot be read.
        """
        if config.swa_directory is None:
            return None
        if config.swa_listen is None or config.swa_token_file is None:
            raise StoreConfigError("swa_directory needs swa_listen and swa_token_file: other nodes fetch from here")
        host_port("swa_directory", config.swa_directory)
        return cls(config.swa_directory, *host_port("swa_listen", config.swa_listen), _token(config), *_tls(config))


class SnapshotService:
    """The ring; with `swa_directory` a server for other nodes and an exchange with them too."""

    def __init__(self, config: ConnectorConfig, engine: int = 0) -> None:
        """`engine`: number of the data-parallel engine; each listens on a port of its own, counted from the given one.

        Raises:
            StoreConfigError: options that do not go together, a file that cannot be read, an address that is taken.
        """
        secret = config.store_options().secret
        self.ring = SnapshotRing(
            config.swa_bytes,
            per_sequence=config.swa_per_sequence,
            expiry_seconds=config.swa_expiry_s,
            secret=secret,
        )
        self.exchange: SnapshotExchange | None = None
        self._server: SnapshotServer | None = None
        self._peers: SnapshotPeers | None = None
        if (sharing := Sharing.read(config)) is None:
            return
        self._server = SnapshotServer(
            (sharing.host, sharing.port + engine if sharing.port else 0),
            sharing.token,
            ring=self.ring,
            tls=sharing.ours,
            insecure=config.swa_insecure,
            connections=64,
        )
        # A request that may wait longer is not ended early by a call of its own.
        patience = max(CALL_SECONDS, config.swa_wait_s)
        self._peers = SnapshotPeers(sharing.token, tls=sharing.theirs, secret=secret, timeout_seconds=patience)
        host = f"[{sharing.host}]" if ":" in sharing.host else sharing.host
        self.exchange = SnapshotExchange(self.ring, self._peers, sharing.directory, f"{host}:{self._server.port}")

    def counts(self) -> Counter[str]:
        """How often what became of snapshots here, since the start."""
        fetches = self._peers.counts() if self._peers is not None else Counter[str]()
        return self.ring.stats().counts + fetches

    def close(self) -> None:
        """Leave the exchange. Idempotent."""
        if self.exchange is not None:
            self.exchange.close()
        if self._server is not None:
            self._server.close()


def _token(config: ConnectorConfig) -> str:
    assert config.swa_token_file is not None
    try:
        return config.swa_token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreConfigError(f"swa_token_file {config.swa_token_file}: {error}") from None


def _tls(config: ConnectorConfig) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    files = config.swa_tls_cert, config.swa_tls_key, config.swa_tls_ca
    if config.swa_insecure and not any(files):
        return None, None
    cert, key, authority = files
    if config.swa_insecure or cert is None or key is None or authority is None:
        raise StoreConfigError("snapshots between nodes: swa_tls_cert, swa_tls_key and swa_tls_ca, or swa_insecure")
    try:
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours.load_cert_chain(cert, key)
        return ours, ssl.create_default_context(cafile=str(authority))
    except OSError as error:
        raise StoreConfigError(f"swa_tls_cert {cert}, swa_tls_key {key}, swa_tls_ca {authority}: {error}") from None
