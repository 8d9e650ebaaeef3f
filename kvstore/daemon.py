"""The daemon of a node: one process that serves all namespaces below a root, in the roles it is given.

Engines do not need it: each keeps the index up to date itself. It answers for them when they are not asked, collects
garbage, and keeps the index warm between engines.
"""

import asyncio
import signal
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import start_http_server

from deepinfer_kvstore.background import in_thread, periodic
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.metrics import Metrics
from deepinfer_kvstore.namespaces import Namespaces
from deepinfer_kvstore.network_fs import require_local
from deepinfer_kvstore.opening import default_index_dir
from deepinfer_kvstore.roles import ROLES
from deepinfer_kvstore.server import Limits

SCAN_SECONDS = 2.0
"""Between two looks for new namespaces."""


@dataclass(frozen=True)
class Address:
    """Where to listen on TCP, and what peers must know and see there."""

    host: str
    port: int
    token: str
    tls: ssl.SSLContext | None


@dataclass(frozen=True)
class DaemonOptions:
    """How a daemon is started."""

    root: Path
    """The store's directory, or the first of an erasure-coded store's."""
    roles: Sequence[str] = ("check", "index", "gc")
    more_roots: Sequence[Path] = ()
    """With erasure coding, the roots after the first, in their order."""
    index_dir: Path | None = None
    """Local directory of indexes; the default is the engines' own."""
    socket: Path | None = None
    """Of CHECK; the default is where clients look: `socket_path`."""
    listen: Address | None = None
    swa_listen: Address | None = None
    """Of the directory of snapshots, for role swa."""
    metrics: tuple[str, int] | None = None
    """Where Prometheus scrapes."""
    limits: Limits = field(default_factory=Limits)
    sync_seconds: float = 0.2
    """Between two looks at the journals."""


class Daemon:
    """What the roles share. For one event loop."""

    def __init__(self, options: DaemonOptions) -> None:
        """Raises:
        StoreConfigError: the root is no directory, or the index directory is on a network file system.
        """
        self.options = options
        self.index_dir = options.index_dir or default_index_dir(options.root)
        require_local(self.index_dir)
        self.namespaces = Namespaces(options.root, self.index_dir, options.more_roots)
        self.metrics = Metrics()
        self.tcp_port = self.swa_port = self.metrics_port = 0
        """Ports that were got, where 0 was asked for."""
        self.metrics.watch(lambda: [namespace.state() for namespace in self.namespaces.all()])

    async def run(self, stop: asyncio.Event, started: Callable[[], object] = lambda: None) -> None:
        """Serve until `stop` is set. `started` is called when every role has begun.

        Raises:
            StoreConfigError: an address cannot be listened on, or another daemon has it.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self.namespaces.close)
            stack.callback(self._serve_metrics())
            await in_thread(self.namespaces.scan)
            await stack.enter_async_context(periodic(SCAN_SECONDS, self.namespaces.scan))
            for role in self.options.roles:
                await stack.enter_async_context(ROLES[role](self))
            started()
            await stop.wait()

    def _serve_metrics(self) -> Callable[[], object]:
        if self.options.metrics is None:
            return lambda: None
        host, port = self.options.metrics
        try:
            server, _ = start_http_server(port, host, self.metrics.registry)
        except OSError as error:
            raise StoreConfigError(f"metrics cannot be served on {host}:{port}: {error}") from error
        self.metrics_port = server.server_port

        def close() -> None:
            server.shutdown()
            server.server_close()

        return close


def serve(options: DaemonOptions, started: Callable[[Daemon], object]) -> None:
    """Run a daemon until SIGTERM or SIGINT.

    Raises:
        StoreConfigError: it cannot be started as asked.
    """

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        daemon = Daemon(options)
        await daemon.run(stop, lambda: started(daemon))

    asyncio.run(main())
