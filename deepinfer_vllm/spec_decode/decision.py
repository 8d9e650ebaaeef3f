"""The two halves of a step's decision: in which order drafts are likely to survive, and how many of whom are verified.

Compiled where there is a C compiler, else by the functions of `budget`: the same bits, some tens of microseconds later.
R: requests; S: draft positions; n: drafts that may be verified.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.native import drafts as native
from deepinfer_vllm.spec_decode.budget import (
    Chances,
    Floats,
    Ints,
    allot,
    convex_floor,
    delayed,
    early_stop,
    filled,
    ranked,
    survival,
)

PRICE = 0.9
"""Of what drafts cost, what they are taken to cost. Throughput is flat around the best budget; this takes the upper
end, as steps have costs that are not measured here and that more tokens a step save."""


class Ranked(NamedTuple):
    """The drafts of a batch."""

    alive: Chances
    """[R, S]: survivals."""
    best: Chances
    """[R * S]: the same, the highest first."""


def by_chances(chances: NDArray[np.floating], scheduled: Ints) -> Ranked:
    """Of drafts that stand with `chances` [R, S] if those before them do, as far as they are scheduled [R]."""
    if native.library() is not None:
        return _compiled(chances, scheduled, multiplied=True)
    alive = survival(chances, scheduled)
    return Ranked(alive, ranked(alive))


def by_survivals(survivals: NDArray[np.floating], scheduled: Ints) -> Ranked:
    """Of survivals [R, S] themselves."""
    if native.library() is not None:
        return _compiled(survivals, scheduled, multiplied=False)
    chances = np.fmin(np.fmax(survivals, 0.0, dtype=np.float32, casting="same_kind"), np.float32(1.0))
    alive = np.where(np.arange(chances.shape[1]) < scheduled[:, None], chances, np.float32(0.0))
    return Ranked(alive, ranked(alive))


def decided(
    drafts: Ranked,
    expected: Floats | None,
    verify_s: Floats,
    draft_s: float,
    sampling: int,
    *,
    early: bool,
    least: int = 0,
) -> tuple[int, Ints]:
    """The budget, and the drafts [R] of each request that it goes to.

    expected: [R * S], survivals that the budget is chosen by, the highest first; None for those of `drafts`; verify_s:
    [n + 1], never falling, seconds of a step with 0 to n drafts; sampling: requests that sample a token anyway; early:
    by `early_stop`, else by `delayed`; least: drafts that are verified at the least.
    """
    requests, positions = drafts.alive.shape
    library = native.library()
    if library is None:
        seconds = verify_s + draft_s
        floor = convex_floor(seconds[0] + PRICE * (seconds - seconds[0]))
        by = drafts.best if expected is None else expected
        budget = early_stop(by, sampling, floor) if early else delayed(by, sampling, floor)
        budget = max(filled(budget, verify_s), least)
        return budget, allot(drafts.alive, budget, drafts.best)
    found, room = np.empty(requests, np.int64), np.empty(3 * len(verify_s))
    verify_s = np.ascontiguousarray(verify_s, np.float64)
    by_s = None if expected is None else np.ascontiguousarray(expected, np.float64)
    budget = library.decide(
        drafts.alive.ctypes.data,
        drafts.best.ctypes.data,
        None if by_s is None else by_s.ctypes.data,
        verify_s.ctypes.data,
        room.ctypes.data,
        found.ctypes.data,
        requests,
        positions,
        len(verify_s) - 1,
        sampling,
        draft_s,
        PRICE,
        not early,
        least,
    )
    return budget, found


def _compiled(chances: NDArray[np.floating], scheduled: Ints, *, multiplied: bool) -> Ranked:
    library = native.library()
    assert library is not None
    (requests, positions), total = chances.shape, chances.size
    said, there = np.ascontiguousarray(chances, np.float32), np.ascontiguousarray(scheduled, np.int64)
    alive, best, keys = (
        np.empty((requests, positions), np.float32),
        np.empty(total, np.float32),
        np.empty(2 * total, "u4"),
    )
    library.survivals(
        said.ctypes.data,
        there.ctypes.data,
        alive.ctypes.data,
        best.ctypes.data,
        keys.ctypes.data,
        requests,
        positions,
        multiplied,
    )
    return Ranked(alive, best)
