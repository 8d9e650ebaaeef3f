"""Which loads are replayed: presets of DeepSeek's figures, at each size of the expert-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from experts import generator, recorded
from experts.generator import Traffic


@dataclass(frozen=True)
class Scene:
    """One trace, and how EPLB runs on it; intervals in steps. `goal`: the published figure of that setting."""

    traffic: Traffic
    ranks: int
    redundant: int
    window: int
    interval: int
    every: int
    layers: int = 12
    model: str = "released"
    goal: float | None = None
    rearrangements: int = 3

    @property
    def physical(self) -> int:
        """Slots a layer: redundant experts a rank, rounded up until all ranks have as many."""
        return -(-(self.traffic.experts + self.redundant * self.ranks) // self.ranks) * self.ranks

    @property
    def starts(self) -> list[int]:
        """Steps before which experts are rearranged: as vLLM does, first after a quarter of the interval."""
        return [self.interval // 4 + n * self.interval for n in range(self.rearrangements)]

    @property
    def steps(self) -> np.ndarray:
        """Those that are looked at: each window, and every `every`-th step from the first rearrangement on."""
        end = self.starts[-1] + self.interval
        windows = {step for start in self.starts for step in range(max(0, start - self.window), start)}
        return np.array(sorted(windows | set(range(self.starts[0], end, self.every))))

    def measured(self, start: int) -> np.ndarray:
        """Which of `steps` are measured after the rearrangement before step `start`."""
        steps = self.steps
        return (steps >= start) & (steps < start + self.interval) & ((steps - self.starts[0]) % self.every == 0)

    def loads(self, seed: int) -> np.ndarray:
        """[steps, layers, experts] int32."""
        if self.model == "mid":
            return recorded.loads(self.traffic, self.steps, seed)
        return generator.loads(self.traffic, self.steps, self.layers, seed)


PREFILL = {"redundant": 4, "window": 100, "interval": 1000, "every": 5}
DECODE = {"redundant": 1, "window": 1000, "interval": 10_000, "every": 20}
GOALS = {2: 1.045, 4: 1.074}
DECODE_GOAL = 1.090
CHOICES = 240
"""The fewest choices of experts a rank and step for which the figures are asked for."""


def scenes() -> dict[str, Scene]:
    """By name. Prefill: 4,096 tokens a rank of 4 sequences; decode: 60 sequences a rank of 4 verified tokens each."""
    made = {}
    for kind, change in (
        ("plain", {}),
        ("skewed", {"skew": 1.2}),
        ("drifting", {"drift": 0.2, "tide": 0.7, "memory": 5000.0}),
    ):
        for ranks in (2, 4, 8):
            traffic = replace(Traffic(4096 * ranks, 4 * ranks, 2.0), **change)
            made[f"{kind}, prefill EP{ranks}"] = Scene(
                traffic, ranks, **PREFILL, goal=GOALS.get(ranks) if kind == "plain" else None
            )
        for ranks in (8, 64):
            traffic = replace(Traffic(240 * ranks, 60 * ranks, 500.0), **change)
            made[f"{kind}, decode EP{ranks}"] = Scene(
                traffic, ranks, **DECODE, goal=DECODE_GOAL if kind == "plain" else None
            )
    for ranks in (2, 4):
        traffic = Traffic(CHOICES * ranks // 6, 4 * ranks, 2.0)
        made[f"plain, prefill EP{ranks}, 240 choices"] = Scene(traffic, ranks, **PREFILL, goal=GOALS[ranks])
    for ranks in (2, 4, 8):
        prefill = Traffic(4096 * ranks, 32 * ranks, 2.0, experts=40, topics=6)
        made[f"mid model, prefill EP{ranks}"] = Scene(prefill, ranks, **PREFILL, layers=16, model="mid")
    for ranks in (8, 64):
        decode = Traffic(128 * 60 * ranks, 60 * ranks, 500.0, experts=40, topics=6)
        made[f"mid model, decode EP{ranks}"] = Scene(decode, ranks, **DECODE, layers=16, model="mid")
    return made
