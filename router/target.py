"""Engines and their data-parallel ranks: what a request is sent to, with what is known of their load."""

from dataclasses import dataclass, field
from typing import NamedTuple

from deepinfer_router.engine_state import EngineState
from deepinfer_router.roles import Role


class Load(NamedTuple):
    """What some senders have at a target."""

    active: int = 0
    kv_tokens: int = 0
    pending_seconds: float = 0.0
    held_tokens: int = 0


NOTHING = Load()
_RUN_AT_MOST = 0.9
"""Of a prefill that runs, the part that it is taken to have had at most."""


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
    state: EngineState = EngineState.READY

    @property
    def active(self) -> int:
        """Requests at all of its ranks."""
        return sum(target.active for target in self.targets)


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
    prefills: dict[int, float] = field(default_factory=dict)
    """Predicted seconds of this process's prefills that wait or run there, oldest first, by the id of their lease."""
    running_seconds: float = 0.0
    """Of the oldest, which an engine computes first."""
    running_since: float = 0.0
    """When it began: when it came, or when the one before it ended."""
    uncertain_until: float = 0.0
    """Slow start: until then it takes only its growing share."""
    window: float | None = None
    """Requests of this process that it may have, under pressure or when it is tried again; None: no bound.

    The fleet heeds it. Each sender bounds its own: by all that is there, what others send could keep one out for good.
    """
    held_tokens: int = 0
    """Of `kv_tokens` what is there now, not only promised: prompts once computed, and what was generated."""
    shared_tokens: int = 0
    """How many of those the engine holds once for several requests, by its last poll: room that sums do not see."""
    peers: Load = NOTHING
    """Part of the load above that the other workers of this host sent."""
    strangers: Load = NOTHING
    """Part of the load above that somebody else sent, by its last poll."""

    def prefill_left(self, now: float) -> float:
        """`pending_seconds` without what the oldest prefill has had. Some of that is left however long it takes: what
        runs is not preferred to nothing."""
        past = now - self.running_since
        most = _RUN_AT_MOST * self.running_seconds
        return self.pending_seconds - (past if past < most else most)

    @property
    def own(self) -> Load:
        """Part of the load that this process sent."""
        peers, strangers = self.peers, self.strangers
        return Load(
            self.active - peers.active - strangers.active,
            self.kv_tokens - peers.kv_tokens - strangers.kv_tokens,
            self.pending_seconds - peers.pending_seconds - strangers.pending_seconds,
            self.held_tokens - peers.held_tokens - strangers.held_tokens,
        )

    def see_peers(self, load: Load) -> None:
        """What other workers of this host have there now."""
        self._replace(self.peers, load)
        self.peers = load

    def see_strangers(self, load: Load) -> None:
        """What others than this host's workers have there now."""
        self._replace(self.strangers, load)
        self.strangers = load

    def _replace(self, old: Load, new: Load) -> None:
        self.active += new.active - old.active
        self.kv_tokens += new.kv_tokens - old.kv_tokens
        self.pending_seconds += new.pending_seconds - old.pending_seconds
        self.held_tokens += new.held_tokens - old.held_tokens
