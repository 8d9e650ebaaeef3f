"""Engines and their data-parallel ranks: what a request is sent to, with what is known of their load."""

from dataclasses import dataclass, field

from deepinfer_router.roles import Role


@dataclass(slots=True, eq=False)
class Engine:
    """One HTTP endpoint, possibly of several data-parallel ranks, which fail together."""

    id: str
    """Unique and stable: discovery that finds it again finds the same."""
    url: str
    """scheme://host:port, without a path."""
    roles: frozenset[Role] = frozenset((Role.PREFILL, Role.DECODE))
    models: tuple[str, ...] = ()
    """Names that it serves; empty: any."""
    kind: str = ""
    """Engines of one kind (hardware, model, options) take equally long for the same work: costs are fitted by kind."""
    generation: int = 0
    """Grows when it comes back, so that nothing old is taken off its new counts."""
    targets: list["Target"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Target:
    """One (engine, dp_rank) and its load, as this process sees it: the last poll and what has been sent since.

    Policies read these fields; leases and polls write them, on the event loop's thread.
    """

    engine: Engine
    rank: int = 0
    active: int = 0
    """Requests there now."""
    kv_tokens: int = 0
    """KV tokens that they hold or are promised."""
    capacity_tokens: int | None = None
    """KV tokens that it has room for; None: not known, no bound."""
    pending_seconds: float = 0.0
    """Predicted seconds of prefill that wait or run there."""
    uncertain_until: float = 0.0
    """Slow start: until then it takes only its growing share."""
