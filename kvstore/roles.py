"""What a daemon can do. A role serves while its context is entered; entering it may raise StoreConfigError."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from deepinfer_kvstore.background import in_thread, periodic
from deepinfer_kvstore.check import Checker
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.gc_role import Collectors
from deepinfer_kvstore.server import Server
from deepinfer_kvstore.snapshot_directory import SnapshotDirectory
from deepinfer_kvstore.snapshot_server import SnapshotServer
from deepinfer_kvstore.socket_claim import claimed_socket, socket_path

if TYPE_CHECKING:
    from deepinfer_kvstore.daemon import Daemon

T = TypeVar("T")

COLLECT_SECONDS = 1.0
"""Between two looks whether there is something to collect."""


@asynccontextmanager
async def check_role(daemon: Daemon) -> AsyncGenerator[None, None]:
    """Answers CHECKs."""
    options = daemon.options
    token = options.listen.token if options.listen else None
    server = Server(Checker(daemon.namespaces, daemon.metrics), daemon.metrics, token=token, limits=options.limits)
    with claimed_socket(options.socket or socket_path(options.root)) as path:
        try:
            await _listening(server.listen_unix(path), str(path))
            if options.listen:
                place = f"{options.listen.host}:{options.listen.port}"
                daemon.tcp_port = await _listening(
                    server.listen_tcp(options.listen.host, options.listen.port, options.listen.tls), place
                )
            yield
        finally:
            await server.close()


@asynccontextmanager
async def index_role(daemon: Daemon) -> AsyncGenerator[None, None]:
    """Keeps the indexes up to date, and writes down what tickets hold."""

    def sync() -> None:
        for namespace in daemon.namespaces.all():
            for op, records in namespace.sync().items():
                daemon.metrics.applied.labels(op).inc(records)

    async with periodic(daemon.options.sync_seconds, sync):
        yield


@asynccontextmanager
async def gc_role(daemon: Daemon) -> AsyncGenerator[None, None]:
    """Collects what is too old or too much, in place of the engines."""
    collectors = Collectors(daemon.namespaces.all)

    def collect() -> None:
        for reason, blocks in collectors.collect().items():
            daemon.metrics.evicted.labels(reason).inc(blocks)

    try:
        async with periodic(COLLECT_SECONDS, collect):
            try:
                yield
            finally:
                collectors.end()
    finally:
        collectors.close()


@asynccontextmanager
async def swa_role(daemon: Daemon) -> AsyncGenerator[None, None]:
    """Tells nodes who holds which snapshot of window state."""
    place = daemon.options.swa_listen
    if place is None:
        raise StoreConfigError(
            "role swa without an address to listen on: give one (--swa-listen), or leave the role out"
        )
    directory = SnapshotDirectory()
    server = SnapshotServer(
        (place.host, place.port), place.token, directory=directory, tls=place.tls, insecure=place.tls is None
    )
    daemon.swa_port = server.port
    daemon.metrics.snapshots.set_function(lambda: len(directory))
    try:
        yield
    finally:
        await in_thread(server.close)


Role = Callable[["Daemon"], AbstractAsyncContextManager[None]]
ROLES: dict[str, Role] = {"check": check_role, "index": index_role, "gc": gc_role, "swa": swa_role}
"""By name on the command line."""


async def _listening(listen: Awaitable[T], place: str) -> T:
    try:
        return await listen
    except OSError as error:
        raise StoreConfigError(f"CHECK cannot listen on {place}: {error}") from error
