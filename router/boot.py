"""What the supervisor's process is started with."""

import sys
from typing import Any, NamedTuple


class Boot(NamedTuple):
    """Plain types, so that another process can be given it, one without pydantic."""

    config: bytes
    """The RouterConfig, checked and pickled, for workers. Without the admin port's secrets."""
    source: dict[str, Any]
    """Where it was read: a ConfigSource of plain types."""
    listen: tuple[str, int]
    engines: list[dict[str, Any]]
    """Those that the configuration lists."""
    workers: int = 1
    drain_s: float = 30.0
    unready_s: float = 0.0
    hung_s: float = 60.0
    admin: tuple[str, int] | None = None
    admin_token: str | None = None
    autoscale: dict[str, Any] = {}
    """Limits of plain types."""
    discovery: dict[str, Any] = {}
    """A DiscoveryConfig of plain types."""
    worker_command: tuple[str, ...] = (sys.executable, "-P", "-m", "deepinfer_router.run")
    """Of a worker's process; the number of its channel's descriptor follows."""
