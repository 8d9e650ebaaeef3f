"""Finds engines for as long as the router runs: a thread a source, in the supervisor.

A source that cannot be asked changes nothing: engines that it found before stay, and their own health says which still
answer.
"""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any, Protocol

PlainEngine = dict[str, Any]
"""An EngineSpec of plain types, and `draining`: the source says that it will go."""
Found = Callable[[list[PlainEngine]], None]
Failed = Callable[[str], None]


class Source(Protocol):
    """One place to ask."""

    name: str
    """Unique, and stable over restarts."""

    def run(self, found: Found, failed: Failed, stop: Event) -> None:
        """Until `stop`: tell `found` all engines whenever they may have changed, `failed` a line when asking fails."""


class Listener(Protocol):
    """Who is told, from the sources' threads."""

    def found(self, source: str, engines: list[PlainEngine]) -> None: ...
    def failed(self, source: str, line: str) -> None: ...


def sources(discovery: dict[str, Any]) -> list[Source]:
    """Of a DiscoveryConfig of plain types. What a source needs is loaded here and only for it.

    Raises:
        RouterConfigError: something that a source needs is not installed or not there.
    """
    found: list[Source] = []
    if discovery.get("file"):
        from deepinfer_router.discovery_file import FileSource

        found.append(FileSource(**discovery["file"]))
    for section in discovery.get("dns", ()):
        from deepinfer_router.discovery_dns import source_of

        found.append(source_of(section))
    for section in discovery.get("kubernetes", ()):
        from deepinfer_router.discovery_kubernetes import KubernetesSource

        found.append(KubernetesSource(**section))
    return found


def start(source: Source, listener: Listener, stop: Event) -> None:
    """Run it in a thread."""

    def run() -> None:
        while not stop.is_set():
            try:
                source.run(
                    lambda engines: listener.found(source.name, engines),
                    lambda line: listener.failed(source.name, line),
                    stop,
                )
            except Exception as error:  # nothing that a source is told may end it
                listener.failed(source.name, f"{type(error).__name__}: {error}")
            stop.wait(5.0)

    Thread(target=run, name=f"discovery {source.name}", daemon=True).start()


def plain_engine(id: str, url: str, section: dict[str, Any], *, draining: bool = False) -> PlainEngine:
    """An engine with what the section says of all that it finds."""
    return {
        "id": id,
        "url": url,
        "roles": section["roles"],
        "models": section["models"],
        "ranks": section["ranks"],
        "capacity_tokens": None,
        "engine_class": section["engine_class"],
        "draining": draining,
    }


def bracketed(address: str) -> str:
    """An address as URLs have it."""
    return f"[{address}]" if ":" in address else address
