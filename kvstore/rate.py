"""How often each peer may ask: token buckets."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from time import monotonic

MAX_PEERS = 4096


class RateLimit:
    """Each peer earns `per_second` requests a second and may save up a second's worth. Not thread-safe.

    Of peers, the `MAX_PEERS` seen last are remembered.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._peers: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allows(self, peer: Hashable, requests: int) -> bool:
        """Whether `peer` may make so many requests now; they are then counted. A debt is not made."""
        now = self._clock()
        saved, at = self._peers.pop(peer, (self._per_second, now))
        saved = min(self._per_second, saved + (now - at) * self._per_second)
        allowed = requests <= saved
        self._peers[peer] = (saved - requests if allowed else saved), now
        while len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return allowed

    def forget(self, peer: Hashable) -> None:
        """It will not come back."""
        self._peers.pop(peer, None)
