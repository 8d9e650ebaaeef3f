"""A placement rule over a scene, as it would run: it sees the window before a rearrangement, steps after it measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from deepinfer_vllm.eplb.moe_lb import drawn_loads
from deepinfer_vllm.eplb.policy import place
from experts import rivals
from experts.measure import hard_bound, noise_floor
from experts.scenes import Scene

Rule = Callable[[np.ndarray, int, int, np.ndarray], np.ndarray]
NODES = 8


def initial(layers: int, physical: int, experts: int) -> np.ndarray:
    """[layers, physical]: where vLLM's experts lie at the start."""
    return np.tile((np.arange(physical) % experts).astype(np.int32), (layers, 1))


def ours(
    counts: np.ndarray,
    ranks: int,
    physical: int,
    current: np.ndarray,
    nodes: int = 1,
    moves_a_layer: int | None = None,
    sums: bool = False,
) -> np.ndarray:
    """`place`, with what it may be asked for; the first rearrangement, from vLLM's own layout, is not bounded."""
    first = bool((current == initial(*current.shape, counts.shape[2])).all())
    most = None if moves_a_layer is None or first else moves_a_layer * counts.shape[1]
    seen = counts.sum(0, keepdims=True) if sums else counts
    return place(seen, ranks, physical, nodes=nodes, current=current, max_moves=most)


RIVALS: dict[str, Rule] = {
    "vLLM": rivals.vllm_default,
    "public EPLB": rivals.public_eplb,
    "DeepInfer": rivals.deepinfer,
}
OURS = "ours"
VARIANTS: dict[str, Rule] = {
    OURS: ours,
    "ours, 16 moves a layer": partial(ours, moves_a_layer=16),
    "ours, sums only": partial(ours, sums=True),
}


def rules_for(scene: Scene) -> dict[str, Rule]:
    """All rules, and ours by nodes of 8 ranks where there are several."""
    by_nodes = {f"ours, {NODES} nodes": partial(ours, nodes=NODES)} if scene.ranks > NODES else {}
    return {**RIVALS, **VARIANTS, **by_nodes}


def replay(scene: Scene, seed: int) -> dict[str, Any]:
    """Of each rule, moe_lb over all steps measured and slots changed a layer and rearrangement, the first left out.

    `parts` is moe_lb of each rearrangement and layer, by which rules are compared in pairs.
    """
    counts = scene.loads(seed)
    measured = counts[np.logical_or.reduce([scene.measured(start) for start in scene.starts])]
    return {
        "rules": {name: _run(rule, scene, counts) for name, rule in rules_for(scene).items()},
        "noise_floor": noise_floor(measured, scene.ranks),
        "hard_bound": hard_bound(measured, scene.ranks, scene.physical),
        "hindsight": _run(ours, scene, counts, hindsight=True)["moe_lb"],
        "choices_a_rank": float(measured.sum(-1).mean() / scene.ranks),
        "hottest": float((measured.mean(0).max(-1) / measured.mean(0).mean(-1)).mean()),
    }


def _run(rule: Rule, scene: Scene, counts: np.ndarray, hindsight: bool = False) -> dict[str, Any]:
    steps = scene.steps
    layers, experts = counts.shape[1:]
    current = initial(layers, scene.physical, experts)
    slowest, mean = [], []
    moves = 0
    for number, start in enumerate(scene.starts):
        after = counts[scene.measured(start)]
        window = after if hindsight else counts[(steps >= start - scene.window) & (steps < start)]
        placed = rule(window, scene.ranks, scene.physical, current)
        moves += int((placed != current).sum()) if number else 0
        current = placed
        loads = drawn_loads(after, current, scene.ranks)
        slowest.append(loads.max(-1).sum(0))
        mean.append(loads.mean(-1).sum(0))
    return {
        "moe_lb": float(np.sum(slowest) / np.sum(mean)),
        "moves_a_layer": moves / layers / (len(scene.starts) - 1),
        "parts": (np.array(slowest) / np.array(mean)).ravel().round(6).tolist(),
    }
