"""Which changes to make where not all may be: those that gain most for each slot that moves."""

from typing import Any

import numpy as np

Array = Any


def affordable(gains: list[Array], moved: list[Array], most: int) -> list[int]:
    """How many of its changes, in their order, each layer makes: at most `most` slots move in all.

    gains: by layer, what each change gains; moved: by layer, how many slots have moved after each.
    """
    pieces = []
    for layer, (gain, after) in enumerate(zip(gains, moved, strict=True)):
        pieces += [(-slope, layer, changes, cost) for slope, changes, cost in _steepest(np.cumsum(gain), after)]
    chosen, left, closed = [0] * len(gains), most, set()
    for _, layer, changes, cost in sorted(pieces):
        if layer in closed:
            continue
        if cost > left:
            closed.add(layer)
            continue
        chosen[layer] = changes
        left -= cost
    return chosen


def _steepest(gained: Array, moved: Array) -> list[tuple[float, int, int]]:
    """(gain a slot, changes until then, slots more) of the pieces of the concave hull of gain over moved slots."""
    pieces = []
    at, value, cost, slope = 0, 0.0, 0, np.inf
    while at < len(gained):
        more = np.maximum(moved[at:] - cost, 0)
        slopes = (gained[at:] - value) / np.maximum(more, 0.5)
        best = int(slopes.argmax())
        if slopes[best] <= 0:
            break
        step = int(more[best])
        at += best + 1
        slope = min(slope, float(slopes[best]))
        pieces.append((slope, at, step))
        value, cost = float(gained[at - 1]), int(moved[at - 1])
    return pieces
