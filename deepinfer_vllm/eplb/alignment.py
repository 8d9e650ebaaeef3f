"""Which rank and which slot a placement's experts take, so that most lie where they lie already."""

from typing import Any

import numpy as np

Array = Any


def aligned(slots: Array, current: Array, ranks: int, nodes: int, experts: int) -> Array:
    """The same placement of one layer [P] with nodes, and ranks within a node, exchanged to be like `current` [P]."""
    nodes_placed = _matched(slots.reshape(nodes, -1), current.reshape(nodes, -1), experts)
    made = [
        _matched(new.reshape(ranks // nodes, -1), old.reshape(ranks // nodes, -1), experts)
        for new, old in zip(nodes_placed, current.reshape(nodes, -1), strict=True)
    ]
    return kept_in_place(np.concatenate(made).ravel(), current, ranks)


def kept_in_place(slots: Array, current: Array, ranks: int) -> Array:
    """The same experts on each rank, each in the slot where the rank already holds it."""
    made = np.full_like(slots, -1)
    for new, old, out in zip(*(x.reshape(ranks, -1) for x in (slots, current, made)), strict=True):
        left = new.tolist()
        for slot, expert in enumerate(old.tolist()):
            if expert in left:
                left.remove(expert)
                out[slot] = expert
        out[out < 0] = left
    return made


def _matched(new: Array, old: Array, experts: int) -> Array:
    """[G, S] groups in the order that gives each old group the new one most like it, the most alike first."""
    groups = len(new)
    alike = _copies(new, experts) @ _copies(old, experts).T
    order: Array = np.empty(groups, np.int64)
    for _ in range(groups):
        source, target = np.unravel_index(int(alike.argmax()), alike.shape)
        order[target] = source
        alike[source, :] = -1
        alike[:, target] = -1
    return new[order]


def _copies(groups: Array, experts: int) -> Array:
    held: Array = np.zeros((len(groups), experts), np.float32)
    np.add.at(held, (np.arange(len(groups))[:, None], groups), 1)
    return held
