"""Temperatures of a draft's confidences, one a position, and their fit to recorded outcomes.

A confidence is the predicted probability that a drafted token stands given that those before it stand; the product up
to position k predicts that all of k do. Sequential temperature scaling (the DSpark paper): position by position, with
the temperatures before it settled, the temperature is taken whose product has the least calibration error.

What is known of a draft of which `drafted` tokens were verified and `accepted` stood: whether positions up to `drafted`
stand. Later ones were cut off by the verification budget, which is no rejection. Nor may a cut draft that failed
earlier count as one that fell at a later position: those that stood would be missing beside it. A budget that chooses
by confidences leaves what it verified unbiased, as the outcome depends on the confidences and not on the choice.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.calibration_error import expected_calibration_error

LEAST_OUTCOMES = 1000
"""Of a position, in the part that is fitted, below which its temperature stays 1."""
LOWEST, HIGHEST, GRID = 0.25, 4.0, 41
"""The first grid of temperatures, even in their logarithm; then as many between the neighbours of the best. Beyond
these, later positions pay for the errors of earlier ones with confidences near 1/2 or 0 and 1, which rank nothing."""
HELD_OUT = 4
"""Every fourth draft (or request, where these are given) is left out of the fit and reported on."""


@dataclass(frozen=True)
class Calibration:
    """Temperatures [S] and how they did on drafts that the fit did not see. Immutable; any thread."""

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...] = ()
    """ECE of the cumulative product at each position without temperatures, held out; empty where nothing was fitted."""
    ece_after: tuple[float, ...] = ()
    outcomes: tuple[int, ...] = ()
    """How many outcomes of each position were fitted and held out together."""
    note: str = ""
    """Why temperatures stayed 1, if some did for another reason than being right."""

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 < t < np.inf for t in self.temperatures):
            raise ValueError(f"temperatures = {self.temperatures}: one positive number a draft position is needed")

    @classmethod
    def identity(cls, positions: int, note: str = "") -> "Calibration":
        """Confidences as the head gives them."""
        return cls((1.0,) * positions, note=note)

    @property
    def is_identity(self) -> bool:
        """Whether `apply` changes nothing."""
        return all(t == 1.0 for t in self.temperatures)

    def apply(self, confidences: NDArray[np.floating]) -> NDArray[np.floating]:
        """sigmoid(logit(c) / T) of confidences [..., S] in 0..1, position by position; themselves where all T are 1.

        Raises ValueError where S is another. 0, 1/2 and 1 stay what they are.
        """
        if confidences.shape[-1] != len(self.temperatures):
            raise ValueError(
                f"{confidences.shape[-1]} draft positions, but a calibration of {len(self.temperatures)}: fit it again"
            )
        return confidences if self.is_identity else scaled(confidences, np.array(self.temperatures))


def scaled(confidences: NDArray[np.floating], temperatures: NDArray[np.floating] | float) -> NDArray[np.floating]:
    """sigmoid(logit(c) / T) in float64, at any T > 0: by odds, whose powers may reach 0 and infinity but never both."""
    chances = np.asarray(confidences, np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        return 1.0 / (1.0 + ((1.0 - chances) / chances) ** (1.0 / np.asarray(temperatures, np.float64)))


def known(drafted: NDArray[np.integer], position: int) -> NDArray[np.bool_]:
    """Of which drafts [N] it is known whether all tokens up to `position`, counted from 0, stand."""
    return np.asarray(drafted) > position


def errors(
    confidences: NDArray[np.floating], drafted: NDArray[np.integer], accepted: NDArray[np.integer]
) -> tuple[float, ...]:
    """ECE of the cumulative product of confidences [N, S] at each position, over the drafts it is known of."""
    product = np.cumprod(np.asarray(confidences, np.float64), axis=1)
    rows = [known(drafted, k) for k in range(product.shape[1])]
    return tuple(expected_calibration_error(product[at, k], np.asarray(accepted)[at] > k) for k, at in enumerate(rows))


def fit(
    confidences: NDArray[np.floating],
    drafted: NDArray[np.integer],
    accepted: NDArray[np.integer],
    requests: NDArray[np.integer] | None = None,
    *,
    least: int = LEAST_OUTCOMES,
) -> Calibration:
    """The calibration of drafts: confidences [N, S], how many tokens were verified and how many of these stood [N].

    With `requests` [N], numbers of any kind, whole requests are held out: drafts of one text are much alike. Where the
    mean error over positions rises, of the drafts that are fitted or of those held out, all temperatures stay 1, with a
    note. Deterministic. Raises ValueError for shapes or values that no record has.
    """
    confidences, drafted, accepted = np.asarray(confidences, np.float64), np.asarray(drafted), np.asarray(accepted)
    _check(confidences, drafted, accepted)
    positions = confidences.shape[1]
    held = _held_out(len(drafted), requests)
    seen, unseen = [(confidences[at], drafted[at], accepted[at]) for at in (~held, held)]
    counts = [[int(known(part[1], k).sum()) for k in range(positions)] for part in (seen, unseen)]
    fitted = sum(a >= least and b >= least // HELD_OUT for a, b in zip(*counts, strict=True))  # counts never rise
    notes = []
    if fitted < positions:
        there = counts[0][fitted] + counts[1][fitted]
        notes.append(
            f"temperature stays 1 from position {fitted + 1} on: {there} outcomes are there,"
            f" {least + least // (HELD_OUT - 1)} are needed"
        )
    temperatures = _sequential(*seen, fitted)
    before, after = errors(*unseen), errors(scaled(unseen[0], temperatures), *unseen[1:])
    if any(_rises(part, temperatures, fitted) for part in (seen, unseen)):
        notes.append("all temperatures stay 1: with the fitted ones the mean error over positions rose")
        temperatures, after = np.ones(positions), before
    elif ends := [k + 1 for k in range(fitted) if np.isclose(temperatures[k], (LOWEST, HIGHEST)).any()]:
        notes.append(f"confidences tell little at positions {ends}, whose temperature is the limit of the search")
    return Calibration(
        tuple(float(t) for t in temperatures),
        before,
        after,
        tuple(a + b for a, b in zip(*counts, strict=True)),
        "; ".join(notes),
    )


def _rises(
    drafts: tuple[NDArray[np.float64], NDArray[np.integer], NDArray[np.integer]],
    temperatures: NDArray[np.float64],
    fitted: int,
) -> bool:
    """Whether the mean error over the first `fitted` positions is larger with temperatures than without."""
    confidences, drafted, accepted = drafts
    after = errors(scaled(confidences, temperatures), drafted, accepted)
    return sum(after[:fitted]) > sum(errors(confidences, drafted, accepted)[:fitted])


def _held_out(drafts: int, requests: NDArray[np.integer] | None) -> NDArray[np.bool_]:
    """Which of the drafts are not fitted; whole requests where there are enough of them."""
    group = np.arange(drafts)
    if requests is not None:
        names, numbers = np.unique(requests, return_inverse=True)
        group = numbers if len(names) >= 2 * HELD_OUT else group
    return group % HELD_OUT == HELD_OUT - 1


def _sequential(
    confidences: NDArray[np.float64], drafted: NDArray[np.integer], accepted: NDArray[np.integer], fitted: int
) -> NDArray[np.float64]:
    """Temperatures [S]; 1 from position `fitted` on."""
    temperatures, before = np.ones(confidences.shape[1]), np.ones(len(drafted))
    for k in range(fitted):
        rows = known(drafted, k)
        temperatures[k] = _best(before[rows], confidences[rows, k], accepted[rows] > k)
        before = before * scaled(confidences[:, k], temperatures[k])
    return temperatures


def _best(before: NDArray[np.float64], confidences: NDArray[np.float64], stood: NDArray[np.bool_]) -> float:
    """The temperature whose scaled confidences, times the product before them, have the least error; of equals, the
    nearest to 1."""
    low, high, best = np.log(LOWEST), np.log(HIGHEST), 0.0
    for _ in range(2):
        grid = np.append(np.linspace(low, high, GRID), [0.0, best])
        grid = grid[np.argsort(np.abs(grid), kind="stable")]
        found = [expected_calibration_error(before * scaled(confidences, np.exp(t)), stood) for t in grid]
        best, step = float(grid[int(np.argmin(found))]), (high - low) / (GRID - 1)
        low, high = max(np.log(LOWEST), best - step), min(np.log(HIGHEST), best + step)
    return float(np.exp(best))


def _check(confidences: NDArray[np.floating], drafted: NDArray[np.integer], accepted: NDArray[np.integer]) -> None:
    if confidences.ndim != 2 or not confidences.shape[1] or not len(confidences) == len(drafted) == len(accepted):
        raise ValueError(
            f"confidences {confidences.shape}, drafted {drafted.shape}, accepted {accepted.shape}: [N, S], [N], [N]"
        )
    if not ((accepted >= 0) & (accepted <= drafted) & (drafted <= confidences.shape[1])).all():
        raise ValueError(f"0 <= accepted <= drafted <= {confidences.shape[1]} must hold of every draft")
    if not ((confidences >= 0) & (confidences <= 1)).all():
        raise ValueError("confidences must lie in 0..1")
