"""How often one of k samples is right."""

from fractions import Fraction
from math import comb


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate that at least one of k samples is right, from `samples`, of which `correct` are.

    1 - C(n - c, k) / C(n, k): the share of the k-subsets with a right one (Chen et al. 2021, arXiv:2107.03374, eq. 1).
    Raises ValueError unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} right among {samples} samples")
    return float(1 - Fraction(comb(samples - correct, k), comb(samples, k)))


def reported(samples: int) -> list[int]:
    """The k to report: powers of two up to `samples`, and `samples`."""
    return sorted({1 << i for i in range(samples.bit_length()) if 1 << i <= samples} | {samples})
