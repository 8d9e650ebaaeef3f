"""Others' rules for placing experts, written from what is published of them; each [T, L, E] counts -> [L, P].

`vllm_default` is vLLM's own code. `public_eplb` is github.com/deepseek-ai/EPLB by its description: on sums, replicas go
to the largest load a replica, then the heaviest replica goes to the lightest rank that has room. `deepinfer` is what is
known of DeepInfer's: on steps, each replica goes where the sum over steps of the largest load of a replica falls most,
then each replica, heaviest first, to the rank where the sum over steps of the slowest rank rises least.
"""

from __future__ import annotations

import numpy as np


def vllm_default(counts: np.ndarray, ranks: int, physical: int, current: np.ndarray) -> np.ndarray:
    """As vLLM calls it: sums, no groups of experts, one node, slots kept where experts stay on their rank."""
    import torch
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    sums = torch.from_numpy(counts.sum(0))
    placed = DefaultEplbPolicy.rebalance_experts(sums, physical, 1, 1, ranks, torch.from_numpy(current))
    return placed.numpy().astype(np.int32)


def public_eplb(counts: np.ndarray, ranks: int, physical: int, current: np.ndarray) -> np.ndarray:
    """It knows nothing of what lies where."""
    return np.stack([_packed(sums, *_by_load(sums, physical), ranks) for sums in counts.sum(0).astype(float)])


def deepinfer(counts: np.ndarray, ranks: int, physical: int, current: np.ndarray) -> np.ndarray:
    """Layers are independent."""
    made = []
    for layer in range(counts.shape[1]):
        steps = np.ascontiguousarray(counts[:, layer].T, dtype=np.float64)
        replicas = _by_slowest_replica(steps, physical)
        made.append(_by_slowest_rank(steps / replicas[:, None], replicas, ranks))
    return np.stack(made)


def _by_load(sums: np.ndarray, physical: int) -> tuple[np.ndarray]:
    replicas = np.ones(len(sums), np.int64)
    for _ in range(physical - len(sums)):
        replicas[np.argmax(sums / replicas)] += 1
    return (replicas,)


def _packed(sums: np.ndarray, replicas: np.ndarray, ranks: int) -> np.ndarray:
    parts = sums / replicas
    items = np.repeat(np.arange(len(sums)), replicas)
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads, room = np.zeros(ranks), len(items) // ranks
    for expert in items[np.argsort(-parts[items], kind="stable")]:
        rank = int(np.argmin(loads))
        held[rank].append(int(expert))
        loads[rank] = loads[rank] + parts[expert] if len(held[rank]) < room else np.inf
    return np.array(held, np.int32).ravel()


def _by_slowest_replica(steps: np.ndarray, physical: int) -> np.ndarray:
    replicas = np.ones(len(steps), np.int64)
    column = np.arange(steps.shape[1])
    for _ in range(physical - len(steps)):
        parts = steps / replicas[:, None]
        first = parts.argmax(0)
        top = parts[first, column]
        parts[first, column] = -1
        second = parts.max(0)
        gains = np.zeros(len(steps))
        less = steps[first, column] / (replicas[first] + 1)
        np.add.at(gains, first, top - np.maximum(second, less))
        replicas[gains.argmax()] += 1
    return replicas


def _by_slowest_rank(parts: np.ndarray, replicas: np.ndarray, ranks: int) -> np.ndarray:
    items = np.repeat(np.arange(len(parts)), replicas)
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads, room = np.zeros((ranks, parts.shape[1])), len(items) // ranks
    slowest = np.zeros(parts.shape[1])
    for expert in items[np.argsort(-parts[items].sum(1), kind="stable")]:
        after = np.maximum(loads + parts[expert], slowest).sum(1)
        after[[len(held_) == room for held_ in held]] = np.inf
        # Many ranks leave the slowest as it is: of those the least loaded.
        rank = int(np.lexsort((loads.sum(1), after))[0])
        held[rank].append(int(expert))
        loads[rank] += parts[expert]
        slowest = np.maximum(slowest, loads[rank])
    return np.array(held, np.int32).ravel()
