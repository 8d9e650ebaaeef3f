"""Seconds that sums take back exactly."""

A_SECOND = 1 << 20


def countable(seconds: float) -> float:
    """`seconds` to the next 2^-20 (about 1 us): of such numbers sums below 2^33 are exact in any order.

    So what a lease added is gone without a rest when it is taken off. Not a number, negative: 0.
    """
    return round(seconds * A_SECOND) / A_SECOND if 0 < seconds < 1e9 else 0.0
