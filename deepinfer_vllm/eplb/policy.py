"""Which expert lies in which slot: the placement that EPLB rearranges to.

Layers are independent. One is placed anew (packing.py) and changed while that lowers the second moments of ranks' loads
(moments.py, search.py); what lies there already is changed likewise, and a new placement is taken instead only where it
is better by what its additional moves are worth.
"""

from typing import Any

import numpy as np

from deepinfer_vllm.eplb.alignment import aligned, kept_in_place
from deepinfer_vllm.eplb.errors import EplbError
from deepinfer_vllm.eplb.migration import affordable

Array = Any

WORTH = 2e-5
"""What moe_lb of a layer has to fall for each slot that changes."""
TRIES, FEW_SLOTS = 16, 128
"""Replacements tried for what they make possible, where slots are few and one more matters."""
LEAST_NOISE = 0.005
"""Of a rank's load in a step, as a part of it, however many tokens there are."""


def place(
    counts: Array,
    ranks: int,
    physical: int,
    *,
    nodes: int = 1,
    current: Array | None = None,
    max_moves: int | None = None,
) -> Array:
    """Placement for the steps to come, from those that were.

    counts [T, L, E]: tokens by step, layer and logical expert; T = 1 where only sums are known. Returns int32
    [L, physical]: the logical expert of each slot; slot p lies on rank p // (physical // ranks), rank r on node
    r // (ranks // nodes). Every expert has a slot; placed anew on several nodes, all its slots are on one of them.
    `current` [L, physical] is what lies there now: experts that stay on their rank stay in their slot, and at most
    `max_moves` slots change in all. The same arguments give the same placement. Raises EplbError.

    numba compiles the search at the first call in an environment, for half a minute, and keeps the result; `prepare`
    does that beforehand.
    """
    counts = _checked(counts, ranks, physical, nodes, current, max_moves)
    layers = [_Layer(np.ascontiguousarray(counts[:, layer]), ranks, nodes) for layer in range(counts.shape[1])]
    if current is None:
        return np.stack([layer.anew(physical) for layer in layers])
    starts = np.ascontiguousarray(current, np.int32)
    changed = [layer.changed(start) for layer, start in zip(layers, starts, strict=True)]
    placed = np.stack(
        [layer.better(start, slots) for layer, start, (slots, _, _) in zip(layers, starts, changed, strict=True)]
    )
    if max_moves is None or (placed != starts).sum() <= max_moves:
        return placed
    changes = affordable([gains for _, gains, _ in changed], [moved for _, _, moved in changed], max_moves)
    bounded = [layer.changed(start, most) for layer, start, most in zip(layers, starts, changes, strict=True)]
    return np.stack([slots for slots, _, _ in bounded])


def prepare() -> None:
    """Compile what `place` needs, or load it: half a minute in a new environment, a second after that."""
    place(np.ones((1, 1, 2), np.int32), 2, 4, current=np.array([[0, 1, 0, 1]]))


class _Layer:
    """Loads of one layer and how its placements are judged."""

    def __init__(self, counts: Array, ranks: int, nodes: int) -> None:
        from deepinfer_vllm.eplb.moments import second_moments

        self.sums = counts.sum(0, dtype=np.float64)
        self.ranks, self.nodes = ranks, nodes
        self.moments = second_moments(counts)
        self.worth = _worth(float(self.sums.sum()), len(counts), ranks)

    def anew(self, physical: int) -> Array:
        """[physical] slots, for whatever lies there now."""
        from deepinfer_vllm.eplb.packing import pack
        from deepinfer_vllm.eplb.search import explore, improve

        slots = pack(self.sums, self.ranks, physical, self.nodes)
        improve(slots, self.ranks, self.nodes, self.moments, self.worth / 16, physical)
        if physical <= FEW_SLOTS:
            explore(slots, self.ranks, self.nodes, self.moments, self.worth, TRIES)
        return slots

    def changed(self, start: Array, most: int | None = None) -> tuple[Array, Array, Array]:
        """`start` after changes worth their moves, `most` of them; what each gains, and slots moved after each."""
        from deepinfer_vllm.eplb.search import improve

        slots = start.copy()
        most = len(start) if most is None else most
        gains, moved = improve(slots, self.ranks, self.nodes, self.moments, 2 * self.worth, most)
        return kept_in_place(slots, start, self.ranks), gains, moved

    def better(self, start: Array, changed: Array) -> Array:
        """`changed`, or a new placement if that is better by what its moves from `start` are worth."""
        from deepinfer_vllm.eplb.search import objective

        new = aligned(self.anew(len(start)), start, self.ranks, self.nodes, len(self.sums))
        price = self.worth * float((new != start).sum() - (changed != start).sum())
        gain = objective(changed, self.ranks, self.moments) - objective(new, self.ranks, self.moments)
        return new if gain > price else changed


def _worth(tokens: float, steps: int, ranks: int) -> float:
    """What the second moments of ranks' loads fall by where moe_lb falls by WORTH.

    The slowest of R ranks whose loads have deviation s lies about s * sqrt(2 ln R) above the mean, and s is at least
    what sampling makes it.
    """
    noise = max(LEAST_NOISE, float(np.sqrt(ranks * steps / max(tokens, 1.0))))
    return tokens / ranks * 2 * noise * WORTH / float(np.sqrt(2 * np.log(max(ranks, 2))))


def _checked(
    counts: Array, ranks: int, physical: int, nodes: int, current: Array | None, max_moves: int | None
) -> Array:
    counts = np.asarray(counts)
    if counts.ndim != 3 or 0 in counts.shape:
        raise EplbError(f"counts have shape {list(counts.shape)}; wanted [steps, layers, experts]")
    if counts.dtype.kind not in "iuf" or not np.isfinite(counts).all() or (counts < 0).any():
        raise EplbError("counts hold negative or infinite values, NaN or no numbers; wanted tokens")
    experts = counts.shape[2]
    if ranks < 1 or physical < experts or physical % ranks:
        raise EplbError(f"{physical} slots on {ranks} ranks; wanted a multiple of the ranks, {experts} or more")
    if nodes < 1 or ranks % nodes:
        raise EplbError(f"{ranks} ranks on {nodes} nodes; wanted as many ranks on each node")
    if max_moves is not None and (current is None or max_moves < 0):
        raise EplbError(f"max_moves {max_moves}: wanted 0 or more, and what lies where now in `current`")
    if current is not None:
        current = np.asarray(current)
        if current.shape != (counts.shape[1], physical):
            raise EplbError(f"current has shape {list(current.shape)}; wanted {[counts.shape[1], physical]}")
        if any(set(layer) != set(range(experts)) for layer in current.tolist()):
            raise EplbError(f"current does not place each expert from 0 to {experts - 1} in every layer")
    return counts
