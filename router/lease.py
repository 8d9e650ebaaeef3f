"""What one hop of a request takes at a target, and that it is given back once."""

from typing import TYPE_CHECKING

from deepinfer_router.metrics import counter
from deepinfer_router.target import Target

if TYPE_CHECKING:
    from deepinfer_router.fleet import Fleet

_LOST = counter(
    "leases_lost", "Leases that nobody gave back: an error of the router, whose counts were mended."
).labels()


class Lease:
    """All counts of one hop. Made by `Fleet.book`; the event loop's thread only.

    Use it as a context manager, or release it in `finally`: cancellation is a BaseException. It holds the target, not
    the engine's name: when an engine was removed and came back, an old lease gives back to the old target's counts.
    """

    __slots__ = ("_fleet", "_prompt_tokens", "held_tokens", "kv_tokens", "outcome", "seconds", "target")

    def __init__(self, fleet: "Fleet", target: Target, prompt_tokens: int, kv_tokens: int, seconds: float) -> None:
        self._fleet = fleet
        self._prompt_tokens = prompt_tokens
        self.target = target
        self.kv_tokens = kv_tokens
        """Held or promised."""
        self.held_tokens = 0
        """Held: 0 until the first token."""
        self.seconds = seconds
        """Of prefill that the target has still to do for it."""
        self.outcome = ""
        """Why it was released; empty: it was not."""
        target.active += 1
        target.kv_tokens += kv_tokens
        if seconds:
            target.pending_seconds += seconds
            if not target.prefills:
                target.running_seconds = seconds
                target.running_since = fleet.clock()
            target.prefills[id(self)] = seconds
        if fleet.touched is not None:
            fleet.touched.add(target)

    def first_token(self, now: float = 0.0) -> None:
        """Its prefill is done: takes those seconds off, and its prompt is held. Later calls do nothing."""
        if self.outcome or self.held_tokens:
            return
        target = self.target
        self._prefilled(target)
        self.held_tokens = self._prompt_tokens
        target.held_tokens += self._prompt_tokens
        if self._fleet.touched is not None:
            self._fleet.touched.add(target)

    def tokens(self, count: int) -> None:
        """`count` more tokens came. They take what was promised; above that the target's `kv_tokens` grow."""
        if self.outcome or count <= 0:
            return
        if not self.held_tokens:
            self.first_token()
        held = self.held_tokens + count
        self.held_tokens = held
        target = self.target
        target.held_tokens += count
        more = held - self.kv_tokens
        if more > 0:
            self.kv_tokens = held
            target.kv_tokens += more

    def release(self, outcome: str = "done") -> None:
        """Gives everything back. Only the first call counts; never raises. `outcome`: a fixed word, a label."""
        if self.outcome:
            return
        self.outcome = outcome or "done"
        target = self.target
        target.active -= 1
        target.kv_tokens -= self.kv_tokens
        target.held_tokens -= self.held_tokens
        if self.seconds:
            self._prefilled(target)
        self._fleet.released(self)

    def _prefilled(self, target: Target) -> None:
        if self.seconds:
            target.pending_seconds -= self.seconds
            self.seconds = 0.0
            prefills, own = target.prefills, id(self)
            if len(prefills) == 1:
                prefills.clear()
                target.running_seconds = 0.0
                target.running_since = self._fleet.clock()
                return
            oldest = next(iter(prefills))
            del prefills[own]
            if oldest == own:
                target.running_seconds = next(iter(prefills.values()))
                target.running_since = self._fleet.clock()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.release("done" if kind is None else "raised")

    def __del__(self) -> None:
        # A path that forgot it must not count for ever.
        if not self.outcome:
            _LOST.inc()
            self.release("lost")
