"""How many requests a KV token weighs, from what engines' own metrics say tokens take."""

from deepinfer_router.decode import DecodePolicy

_FACTORS = tuple(2.0 ** (step / 2) for step in range(-4, 5))
_OLD_COUNTS = 0.999
_ENOUGH = 200
_BETTER = 0.9


class WeightFit:
    """Finds w of `seconds = a + b * (active + w * kv_tokens)` by least squares, and sets it in a policy.

    Only nine w are tried, from a quarter of the configured one to four times it: where load is balanced, active and
    KV tokens rise and fall together, and free coefficients could be anything. Another w is taken when a tenth less of
    the squares is left with it. A sample is a target's second; each that comes makes the older count 0.1 % less.
    """

    def __init__(self, policy: DecodePolicy, kv_weight: float) -> None:
        self._policy = policy
        self._candidates = tuple(kv_weight * factor for factor in _FACTORS)
        self.kv_weight = kv_weight
        """The one that is set."""
        self._samples = 0
        self._sums = [0.0] * 10
        """Of 1, n, k, y, nn, nk, kk, ny, ky, yy: n active requests, k KV tokens, y seconds."""

    def observe(self, active: int, kv_tokens: int, seconds: float) -> None:
        """A decode step took so long with this load."""
        if active <= 0 or not 0 < seconds < 60:
            return
        # Near 1, so that sums of squares keep their digits.
        n, k, y = float(active), kv_tokens * self._candidates[4], seconds
        moments = (1.0, n, k, y, n * n, n * k, k * k, n * y, k * y, y * y)
        self._sums = [old * _OLD_COUNTS + new for old, new in zip(self._sums, moments, strict=True)]
        self._samples += 1
        if self._samples >= _ENOUGH and self._samples % 50 == 0:
            self._choose()

    def _choose(self) -> None:
        left = {weight: self._left(weight / self._candidates[4]) for weight in self._candidates}
        best = min(left, key=lambda weight: left[weight])
        if left[best] < _BETTER * left[self.kv_weight]:
            self.kv_weight = best
            self._policy.weigh(best)

    def _left(self, factor: float) -> float:
        """Squares that a line through (n + factor * k, y) leaves; with a slope below 0 all of them."""
        one, n, k, y, nn, nk, kk, ny, ky, yy = self._sums
        x = n + factor * k
        xx = nn + 2 * factor * nk + factor * factor * kk - x * x / one
        xy = ny + factor * ky - x * y / one
        rest = yy - y * y / one
        return rest - xy * xy / xx if xx > 0 and xy > 0 else rest
