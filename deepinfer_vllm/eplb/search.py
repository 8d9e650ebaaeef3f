"""Better placements of one layer by small changes: two slots swapped, or one given to another expert.

With x_k the shares of experts that rank k computes, the second moment of its load is x_k' M x_k; what is lowered is the
sum over ranks, that is the mean square of ranks' deviations from the mean load. M is that of `moments.second_moments`.
"""

from typing import Any, NamedTuple

import numpy as np

from deepinfer_vllm.eplb.compiled import compiled

Array = Any

WANTED = 16
"""Experts, of the largest load a replica, that are tried for one replica more."""


class Held(NamedTuple):
    """A placement of one layer, and what is kept up to date of it; changed in place."""

    slots: Array
    """[P] int32 experts."""
    moments: Array
    """[E, E]."""
    replicas: Array
    """[E]."""
    copies: Array
    """[E, ranks] slots of an expert on a rank."""
    pull: Array
    """[ranks, E]: moments @ shares, what an expert's load has in common with a rank's."""
    ranks_per_node: int


@compiled
def improve(
    slots: Array, ranks: int, nodes: int, moments: Array, least: float, most_changes: int
) -> tuple[Array, Array]:
    """Change `slots` [P] in place while a change gains `least`, the changes that gain most about first.

    Returns what each change gained, and how many slots differed from the first placement after it. With several nodes
    no change spreads an expert over more of them. At most `most_changes` are made.
    """
    start = slots.copy()
    held = _held(slots, ranks, nodes, moments)
    gains, moved = [0.0], [0]
    level = _objective(held) / 8
    while len(gains) <= most_changes and level > 0:
        level = max(level / 8, least)
        _changes(held, start, level, most_changes, gains, moved)
        if level <= least:
            break
    return np.array(gains[1:]), np.array(moved[1:])


@compiled
def objective(slots: Array, ranks: int, moments: Array) -> float:
    """The sum over ranks of the second moments of their loads."""
    return float(_objective(_held(slots, ranks, 1, moments)))


@compiled
def _objective(held: Held) -> float:
    total = 0.0
    per_rank = len(held.slots) // len(held.pull)
    for slot in range(len(held.slots)):
        expert = held.slots[slot]
        total += held.pull[slot // per_rank, expert] / held.replicas[expert]
    return total


@compiled
def _held(slots: Array, ranks: int, nodes: int, moments: Array) -> Held:
    experts = len(moments)
    replicas: Array = np.zeros(experts, np.int64)
    copies: Array = np.zeros((experts, ranks), np.int64)
    pull = np.zeros((ranks, experts))
    per_rank = len(slots) // ranks
    for slot in range(len(slots)):
        replicas[slots[slot]] += 1
        copies[slots[slot], slot // per_rank] += 1
    for slot in range(len(slots)):
        pull[slot // per_rank] += moments[slots[slot]] / replicas[slots[slot]]
    return Held(slots, moments, replicas, copies, pull, ranks // nodes)


@compiled
def _changes(held: Held, start: Array, least: float, most: int, gains: list[float], moved: list[int]) -> None:
    """Replacements and swaps until none gains `least`; adds to `gains` and `moved`."""
    own = np.diag(held.moments).copy()
    nothing: Array = np.zeros((1, 1), np.bool_)
    busy = True
    while busy:
        before = len(gains)
        wanted = _wanted(own, held.replicas)
        while len(gains) <= most:
            gain = _replace(held, wanted, least, nothing)
            if gain <= 0:
                break
            gains.append(gain)
            moved.append((held.slots != start).sum())
        _swaps(held, start, least, most, gains, moved)
        busy = len(gains) > before


@compiled
def _wanted(own: Array, replicas: Array) -> Array:
    return np.argsort(-own / replicas**2, kind="mergesort")[:WANTED]


@compiled
def _swaps(held: Held, start: Array, least: float, most: int, gains: list[float], moved: list[int]) -> None:
    """Swaps between all pairs of ranks, until none gains `least`."""
    ranks = len(held.pull)
    scratch = np.empty((3, len(held.slots) // ranks))
    changed: Array = np.zeros(ranks, np.int64)  # at which look the rank last changed
    seen = np.full((ranks, ranks), -1)  # at which look the pair was last tried
    look = 0
    busy = True
    while busy:
        busy = False
        for a in range(ranks):
            for b in range(a + 1, ranks):
                while len(gains) <= most and seen[a, b] < max(changed[a], changed[b]):
                    look += 1
                    seen[a, b] = look
                    gain = _swap(held, a, b, least, scratch)
                    if gain > 0:
                        look += 1
                        changed[a] = changed[b] = look
                        busy = True
                        gains.append(gain)
                        moved.append((held.slots != start).sum())


@compiled
def explore(slots: Array, ranks: int, nodes: int, moments: Array, least: float, tries: int) -> None:
    """Change `slots` in place by replacements that lose by themselves and gain with what they make possible."""
    best = objective(slots, ranks, moments)
    own = np.diag(moments).copy()
    tried: Array = np.zeros((len(moments), len(moments)), np.bool_)
    for _ in range(tries):
        held = _held(slots.copy(), ranks, nodes, moments)
        _replace(held, _wanted(own, held.replicas), -np.inf, tried)
        if (held.slots == slots).all():
            break
        gains, moved = [0.0], [0]
        _swaps(held, slots, least, len(slots), gains, moved)
        _changes(held, slots, least, 2 * len(slots), gains, moved)
        value = _objective(held)
        if value < best - least:
            best = value
            slots[:] = held.slots
            tried[:] = False


@compiled
def _swap(held: Held, a: int, b: int, least: float, scratch: Array) -> float:
    """The best swap between ranks a and b, done if it gains `least`; the gain, or 0. scratch [3, slots a rank].

    A part d of the loads that goes from a to b changes the sum by 2 (d'M d - d'M x_a + d'M x_b).
    """
    slots, moments, replicas, copies, pull = held.slots, held.moments, held.replicas, held.copies, held.pull
    gives, takes, parts = scratch[0], scratch[1], scratch[2]
    per_rank = len(gives)
    apart = a // held.ranks_per_node != b // held.ranks_per_node
    best, at, to = least / 2, -1, -1
    for n in range(per_rank):
        i, j = slots[a * per_rank + n], slots[b * per_rank + n]
        part_i, part_j = 1.0 / replicas[i], 1.0 / replicas[j]
        parts[n] = 2 * part_j
        gives[n] = part_i * (pull[a, i] - pull[b, i] - part_i * moments[i, i])
        takes[n] = part_j * (pull[a, j] - pull[b, j] + part_j * moments[j, j])
        if copies[i, b] > 0 or (apart and replicas[i] > 1):
            gives[n] = -np.inf
        if copies[j, a] > 0 or (apart and replicas[j] > 1):
            takes[n] = np.inf
    for n in range(per_rank):
        if gives[n] == -np.inf:
            continue
        i = slots[a * per_rank + n]
        part = 1.0 / replicas[i]
        for m in range(per_rank):
            gain = gives[n] - takes[m] + part * parts[m] * moments[i, slots[b * per_rank + m]]
            if gain > best:
                best, at, to = gain, n, m
    if at < 0:
        return 0.0
    i, j = slots[a * per_rank + at], slots[b * per_rank + to]
    slots[a * per_rank + at], slots[b * per_rank + to] = j, i
    copies[i, a] -= 1
    copies[j, b] -= 1
    copies[j, a] += 1
    copies[i, b] += 1
    change = moments[i] / replicas[i] - moments[j] / replicas[j]
    pull[a] -= change
    pull[b] += change
    return 2 * best


@compiled
def _replace(held: Held, wanted: Array, least: float, tried: Array) -> float:
    """The best slot to take from an expert of several replicas for one of `wanted`, done if it gains; the gain, or 0.

    Of an expert x in r slots, c_k of them on rank k, rank k then computes more by c_k / (r (r - 1)), and the rank that
    loses one computes less by 1 / (r - 1); of a wanted y the others compute less by c_k / (r (r + 1)). `tried` [E, E],
    or [1, 1] for none: pairs x, y to leave out, to which this one is added.
    """
    slots, moments, replicas, copies, pull = held.slots, held.moments, held.replicas, held.copies, held.pull
    per_rank, per_node = len(slots) // len(pull), held.ranks_per_node
    best, best_slot, best_y = least, -1, -1
    fewer = np.empty(len(wanted))
    for n in range(len(wanted)):
        fewer[n] = _spread(held, wanted[n], -1.0 / (replicas[wanted[n]] * (replicas[wanted[n]] + 1)))
    for slot in range(len(slots)):
        x, at = slots[slot], slot // per_rank
        if replicas[x] < 2:
            continue
        first = at // per_node * per_node
        more, lost = 1.0 / (replicas[x] * (replicas[x] - 1)), 1.0 / (replicas[x] - 1)
        without = _spread(held, x, more)
        without += lost * (lost * moments[x, x] - 2 * (pull[at, x] + more * copies[x, at] * moments[x, x]))
        for n in range(len(wanted)):
            y = wanted[n]
            if len(tried) > 1 and tried[x, y]:
                continue
            if copies[y, at] > 0 or (per_node < len(pull) and copies[y, first : first + per_node].sum() == 0):
                continue
            part = 1.0 / (replicas[y] + 1)
            both = part * (more * copies[x, at] - lost)
            both -= more * part / replicas[y] * (copies[x] * copies[y]).sum()
            gain = -without - fewer[n] - part * (2 * pull[at, y] + part * moments[y, y]) - 2 * both * moments[x, y]
            if gain > best:
                best, best_slot, best_y = gain, slot, y
    if best_slot < 0:
        return 0.0
    if len(tried) > 1:
        tried[slots[best_slot], best_y] = True
    _give(held, best_slot, best_y)
    return best


@compiled
def _spread(held: Held, expert: int, by: float) -> float:
    """How the sum changes if each rank computes more of an expert by `by` for each slot it has of it."""
    more = 0.0
    for rank in range(len(held.pull)):
        part = by * held.copies[expert, rank]
        if part != 0:
            more += part * (2 * held.pull[rank, expert] + part * held.moments[expert, expert])
    return more


@compiled
def _give(held: Held, slot: int, y: int) -> None:
    moments, replicas, copies, pull = held.moments, held.replicas, held.copies, held.pull
    x, at = held.slots[slot], slot // (len(held.slots) // len(pull))
    for rank in range(len(pull)):
        if copies[x, rank] > 0:
            pull[rank] += moments[x] * (copies[x, rank] / (replicas[x] * (replicas[x] - 1)))
        if copies[y, rank] > 0:
            pull[rank] -= moments[y] * (copies[y, rank] / (replicas[y] * (replicas[y] + 1)))
    pull[at] += moments[y] / (replicas[y] + 1) - moments[x] / (replicas[x] - 1)
    copies[x, at] -= 1
    copies[y, at] += 1
    replicas[x] -= 1
    replicas[y] += 1
    held.slots[slot] = y
