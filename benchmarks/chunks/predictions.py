"""What the chunk scheduler says of steps beside what they took."""

from __future__ import annotations

from typing import Any

SETTLED = 200
"""Steps, after which predictions are to be right."""


def predictions(engine: Any) -> list[tuple[float, float]]:
    """A list that gets of each step of an `LLMEngine` in this process the seconds predicted and the seconds measured.

    Once an engine, whose scheduler is ours.
    """
    found: list[tuple[float, float]] = []
    stats = engine.engine_core.engine_core.scheduler._stats
    measured = stats.measured

    def measure(predicted_s: float, seconds: float) -> None:
        found.append((predicted_s, seconds))
        measured(predicted_s, seconds)

    stats.measured = measure
    return found
