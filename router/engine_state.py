"""How an engine is doing."""

from enum import StrEnum


class EngineState(StrEnum):
    """Engines in one of `GETS_WORK` get new work."""

    STARTING = "starting"
    """Known, and not yet heard of."""
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has."""
    SUSPECT = "suspect"
    """Faults of late, too few to leave it, or no other engine to turn to."""
    OPEN = "open"
    """Its circuit is open: it gets nothing until it is tried again."""
    HALF_OPEN = "half_open"
    """One request at a time, until one ends well."""
    GONE = "gone"
    """Removed. What it still has is counted to nobody."""


GETS_WORK = frozenset((EngineState.READY, EngineState.SUSPECT, EngineState.HALF_OPEN))
