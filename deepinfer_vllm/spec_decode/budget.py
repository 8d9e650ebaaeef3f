"""How many drafts of a batch are verified in one step, and which.

A draft survives if it and all drafts before it are accepted; its survival is the product of the confidences up to it.
Verifying the n most likely survivors yields, expected, `sampling` + the sum of their survivals tokens and takes
`seconds[n]`. Each function is pure; `decision` has them compiled, to the same bits. R: requests; S: draft positions.

Whether a draft is verified must not depend on itself or on what was drawn after it, or accepted tokens would no longer
be distributed as the target's. A survival at position j depends on drafts before j, so `early_stop`, which decides
about a draft by survivals no less than its own, and `delayed`, which decides by those of an earlier step, keep that;
the best budget by current survivals does not, unless costs are convex: then it is what `early_stop` finds.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Chances: TypeAlias = NDArray[np.float32]
"""Sorted in a third of the time that float64's are."""
Ints: TypeAlias = NDArray[np.int64]


def survival(confidences: NDArray[np.floating], scheduled: Ints) -> Chances:
    """[R, S]: the chance that each draft survives; 0 beyond what is scheduled, and where a confidence is no number.

    confidences: [R, S], the chance that a draft is accepted if those before it are; scheduled: [R], drafts there are.
    """
    alive = np.fmin(np.fmax(confidences, 0.0, dtype=np.float32, casting="same_kind"), np.float32(1.0))
    if scheduled.min(initial=alive.shape[1]) < alive.shape[1]:
        alive[np.arange(alive.shape[1]) >= scheduled[:, None]] = 0.0
    for position in range(1, alive.shape[1]):  # half the time of numpy's cumprod
        alive[:, position] *= alive[:, position - 1]
    return alive


def ranked(survival: Chances) -> Chances:
    """[R * S]: the highest first."""
    return np.sort(survival, axis=None)[::-1]


def early_stop(ranked: NDArray[np.floating], sampling: int, seconds: Floats) -> int:
    """Drafts to verify: as many as it takes until one more no longer raises tokens a second.

    Algorithm 1 of the DSpark paper (DeepSpec). ranked: current survivals, the highest first; sampling: requests that
    sample a token anyway; seconds: [n + 1], positive, of a step that verifies 0, 1, ... n drafts. Returns at most n.
    Stops for good at the first cost that jumps: give it `convex_floor` of costs that have steps.
    """
    rates = _rates(ranked, sampling, seconds)
    stops = rates[1:] <= rates[:-1]
    return int(stops.argmax()) if stops.any() else len(rates) - 1


def delayed(stale_ranked: NDArray[np.floating], sampling: int, seconds: Floats) -> int:
    """Drafts to verify: the least number with the most tokens a second, by survivals that are not of these drafts.

    Section 5.2 of the DSpark paper. stale_ranked: survivals of earlier steps, the highest first; sampling, seconds: as
    in `early_stop`.
    """
    return int(_rates(stale_ranked, sampling, seconds).argmax())


def allot(survival: NDArray[np.floating], budget: int, ranked: NDArray[np.floating] | None = None) -> Ints:
    """[R]: drafts to verify of each request, the most likely survivors of all; of equal ones earlier positions, then
    earlier requests. A request's are always its first ones. No more than survive with any chance.

    survival: [R, S]; ranked: the same, the highest first, where they are at hand.
    """
    if budget <= 0 or budget >= survival.size:
        return (survival > (0.0 if budget > 0 else np.inf)).sum(axis=1)
    least = np.partition(survival, -budget, axis=None)[-budget] if ranked is None else ranked[budget - 1]
    taken = survival >= least if least > 0.0 else survival > 0.0
    drafts: Ints = taken.sum(axis=1)
    if (beyond := int(drafts.sum()) - budget) > 0:
        equal = np.flatnonzero((survival == least).T)[-beyond:]
        np.subtract.at(drafts, equal % len(drafts), 1)
    return drafts


def convex_floor(seconds: Floats) -> Floats:
    """[n + 1]: the largest convex function that is nowhere above `seconds` [n + 1].

    Where a step is padded to the next captured size, the first draft of a size pays for all; this spreads the price, so
    that `early_stop` looks beyond the jump. It depends on costs alone, so nothing is learnt of drafts too early.
    """
    rises = seconds[1:] - seconds[:-1]
    bends = rises[1:] - rises[:-1] * (1.0 + 1e-9)
    if not (bends < -2e-9 * rises[:-1]).any():
        return seconds
    kinks = np.flatnonzero(bends > 0.0) + 1
    places = [0, *kinks.tolist(), len(seconds) - 1]
    xs, ys = [0], [float(seconds[0])]
    for x, y in zip(places[1:], seconds[places[1:]].tolist(), strict=True):
        while len(xs) > 1 and (ys[-1] - ys[-2]) * (x - xs[-1]) >= (y - ys[-1]) * (xs[-1] - xs[-2]):
            xs.pop()
            ys.pop()
        xs.append(x)
        ys.append(y)
    corners, heights = np.array(xs), np.array(ys)
    at = np.arange(len(seconds) - 1)
    left = np.searchsorted(corners, at, side="right") - 1
    slopes = (heights[1:] - heights[:-1]) / (corners[1:] - corners[:-1])
    return np.append(heights[left] + slopes[left] * (at - corners[left]), heights[-1])


def filled(budget: int, seconds: Floats) -> int:
    """The largest budget that takes no longer: drafts that only replace padding are free. seconds: [n + 1], rising."""
    return int(np.searchsorted(seconds, seconds[budget], side="right")) - 1


def _rates(ranked: NDArray[np.floating], sampling: int, seconds: Floats) -> Floats:
    """[n + 1]: expected tokens a second with 0, 1, ... n drafts, the most likely survivors first."""
    drafts = min(len(seconds) - 1, len(ranked))
    tokens = np.empty(drafts + 1)
    tokens[0] = sampling
    tokens[1:] = ranked[:drafts]
    return tokens.cumsum() / seconds[: drafts + 1]
