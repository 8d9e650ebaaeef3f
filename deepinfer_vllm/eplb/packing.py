"""A placement from nothing: replicas to the largest loads, then the heaviest first to the lightest rank.

The rule of github.com/deepseek-ai/EPLB, with two more conditions: replicas of an expert lie on different ranks where
there are enough, and with several nodes each expert has all its replicas on one.
"""

from typing import Any

import numpy as np

from deepinfer_vllm.eplb.compiled import compiled

Array = Any


@compiled
def pack(weights: Array, ranks: int, physical: int, nodes: int) -> Array:
    """[E] loads -> [physical] int32 slots. With fewer experts than nodes, as if all ranks were on one."""
    experts = len(weights)
    if experts < nodes:
        nodes = 1
    home = _homes(weights, nodes)
    slots: Array = np.empty(physical, np.int32)
    here, per_node = ranks // nodes, physical // nodes
    for node in range(nodes):
        own = np.nonzero(home == node)[0]
        replicas = _replicas(weights[own], per_node, here)
        parts = np.empty(per_node)
        items: Array = np.empty(per_node, np.int32)
        at = 0
        for index in range(len(own)):
            for _ in range(replicas[index]):
                items[at] = own[index]
                parts[at] = weights[own[index]] / replicas[index]
                at += 1
        order = np.argsort(-parts, kind="mergesort")
        _fill(items[order], parts[order], here, slots[node * per_node : (node + 1) * per_node])
    return slots


@compiled
def _homes(weights: Array, nodes: int) -> Array:
    """[E] node of each expert: as many on each, the heaviest first to the lightest node."""
    experts = len(weights)
    room = (experts + nodes - 1) // nodes
    home: Array = np.empty(experts, np.int64)
    load: Array = np.zeros(nodes)
    held: Array = np.zeros(nodes, np.int64)
    for expert in np.argsort(-weights, kind="mergesort"):
        best = -1
        for node in range(nodes):
            if held[node] < room and (
                best < 0 or load[node] < load[best] or (load[node] == load[best] and held[node] < held[best])
            ):
                best = node
        home[expert] = best
        load[best] += weights[expert]
        held[best] += 1
    return home


@compiled
def _replicas(weights: Array, slots: int, ranks: int) -> Array:
    """[E] replicas that fill `slots`; more than `ranks` of one only where every expert has so many."""
    replicas: Array = np.ones(len(weights), np.int64)
    for _ in range(slots - len(weights)):
        full = replicas.min() >= ranks
        best = -1
        for expert in range(len(weights)):
            if replicas[expert] >= ranks and not full:
                continue
            if best < 0:
                best = expert
                continue
            more = weights[expert] * replicas[best] - weights[best] * replicas[expert]
            if more > 0 or (more == 0 and replicas[expert] < replicas[best]):
                best = expert
        replicas[best] += 1
    return replicas


@compiled
def _fill(items: Array, parts: Array, ranks: int, slots: Array) -> None:
    """Each item, heaviest first, to the lightest rank that has room and, if there is one, not yet its expert."""
    room = len(slots) // ranks
    load: Array = np.zeros(ranks)
    held: Array = np.zeros(ranks, np.int64)
    for index in range(len(items)):
        best, best_new = -1, False
        for rank in range(ranks):
            if held[rank] == room:
                continue
            new = not (slots[rank * room : rank * room + held[rank]] == items[index]).any()
            if best < 0 or new > best_new or (new == best_new and load[rank] < load[best]):
                best, best_new = rank, new
        slots[best * room + held[best]] = items[index]
        load[best] += parts[index]
        held[best] += 1
