"""What the models ask of a policy: the shape that the router's own have."""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from deepinfer_router.pick import Pick
from deepinfer_router.target import Target
from deepinfer_router.work import Work


class Policy(Protocol):
    """Chooses where a request goes."""

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        """One of `targets`, or None where the request has to wait. `now`: seconds, virtual."""
        ...
