"""Which expert lies in which slot: the placement that EPLB rearranges to."""

from typing import Any

import numpy as np

from deepinfer_vllm.eplb.errors import EplbError

Array = Any


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
    r // (ranks // nodes). Every expert has a slot. `current` [L, physical] is what lies there now: experts that stay on
    their rank stay in their slot, and at most `max_moves` slots change in all. The same arguments give the same
    placement. Raises EplbError.
    """
    counts = _checked(counts, ranks, physical, nodes, current)
    weights = counts.sum(axis=0, dtype=np.float64)
    placed = np.stack([_packed(layer, ranks, physical) for layer in weights])
    if current is None:
        return placed
    for layer, slots in enumerate(placed):
        placed[layer] = _kept_in_place(slots, current[layer], ranks)
    if max_moves is not None:
        changed = (placed != current).sum(axis=1)
        kept = np.cumsum(changed) > max_moves
        placed[kept] = current[kept]
    return placed


def _checked(counts: Array, ranks: int, physical: int, nodes: int, current: Array | None) -> Array:
    counts = np.asarray(counts)
    if counts.ndim != 3 or 0 in counts.shape:
        raise EplbError(f"counts have shape {list(counts.shape)}; wanted [steps, layers, experts]")
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise EplbError("counts hold negative or infinite values or NaN; wanted tokens")
    experts = counts.shape[2]
    if ranks < 1 or physical < experts or physical % ranks:
        raise EplbError(f"{physical} slots on {ranks} ranks; wanted a multiple of the ranks, {experts} or more")
    if nodes < 1 or ranks % nodes:
        raise EplbError(f"{ranks} ranks on {nodes} nodes; wanted as many ranks on each node")
    if current is not None and np.shape(current) != (counts.shape[1], physical):
        raise EplbError(f"current has shape {list(np.shape(current))}; wanted {[counts.shape[1], physical]}")
    return counts


def _packed(weights: Array, ranks: int, physical: int) -> Array:
    """Replicas to the most loaded, then each to the least loaded rank with a free slot, heaviest first."""
    replicas = np.ones(len(weights), np.int64)
    for _ in range(physical - len(weights)):
        replicas[np.argmax(weights / replicas)] += 1
    items = np.repeat(np.arange(len(weights)), replicas)
    parts = weights / replicas
    slots = physical // ranks
    placed, loads, used = np.empty((ranks, slots), np.int32), np.zeros(ranks), np.zeros(ranks, np.int64)
    for expert in items[np.argsort(-parts[items], kind="stable")]:
        rank = int(np.argmin(np.where(used < slots, loads, np.inf)))
        placed[rank, used[rank]] = expert
        used[rank] += 1
        loads[rank] += parts[expert]
    return placed.ravel()


def _kept_in_place(slots: Array, current: Array, ranks: int) -> Array:
    """The same placement, with each expert that a rank already holds in the slot where it lies."""
    made = np.full_like(slots, -1)
    for new, old, out in zip(
        slots.reshape(ranks, -1), current.reshape(ranks, -1), made.reshape(ranks, -1), strict=True
    ):
        left = list(new)
        for place_, expert in enumerate(old):
            if expert in left:
                left.remove(expert)
                out[place_] = expert
        out[out < 0] = left
    return made
