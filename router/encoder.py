"""Which engine encodes a request's images."""

from collections.abc import Sequence
from random import Random

from deepinfer_router.pick import Pick
from deepinfer_router.slow_start import within_share
from deepinfer_router.target import Target
from deepinfer_router.work import Work

SECONDS_A_MEGAPIXEL = 0.05
"""Only ratios matter for the choice: any constant gives the target with the least pixels outstanding."""
_SECONDS_AN_IMAGE = 0.005
_PIXELS_UNKNOWN = 1_000_000


class EncoderPolicy:
    """The least outstanding pixels. No I/O, no clock, no state."""

    def __init__(self, slow_start_s: float = 30.0) -> None:
        self._slow_start_s = slow_start_s

    def seconds(self, work: Work) -> float:
        """What its images weigh, to be booked with the pick; images of unknown size count as a megapixel each."""
        pixels = work.pixels or work.images * _PIXELS_UNKNOWN
        return pixels / 1e6 * SECONDS_A_MEGAPIXEL + work.images * _SECONDS_AN_IMAGE

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        """A target; None where there is none that has not failed this request."""
        left = [target for target in targets if target.engine.id not in work.excluded]
        if not left:
            return None
        able = within_share(left, now, self._slow_start_s)
        least = min((target.pending_seconds, target.active) for target in able)
        ties = [target for target in able if (target.pending_seconds, target.active) == least]
        return Pick(ties[int(rng.random() * len(ties))], "least pixels", least[0] + self.seconds(work))
