"""What a run of the prefill model came to, in numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from deepinfer_simulator.prefill_model import PrefillRun

EDGES = (16_384, 65_536, 262_144)
"""Between the groups by prompt length that are told apart, whatever the policy did."""
WARM_UP = 0.1
"""Of the run, whose prompts do not count: pools have to see traffic first."""
STABLE_DRIFT = 1.5
"""More than this, and times grow with the length of the run: they are not a result."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Prompts of one range of lengths."""

    prompts: int
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """Seconds to first token, after the warm-up."""

    prompts: int
    mean_s: float
    groups: tuple[GroupStats, ...]
    drift: float
    """Mean of the last quarter over that of the first."""
    efficiency: float
    """Of lock-step: chunks over steps, of the whole run."""
    moves_per_minute: float

    @property
    def stable(self) -> bool:
        """Whether its times are those of a queue that has stopped growing."""
        return self.drift <= STABLE_DRIFT


def statistics(run: PrefillRun, seconds: float, moves: int, edges: Sequence[int] = EDGES) -> PrefillStats:
    """`seconds`: for which prompts arrived. Raises ValueError where none came after the warm-up."""
    warm = WARM_UP * seconds
    times = [(s.request.at - warm, s.seconds, s.request.input_tokens) for s in run.served if s.request.at >= warm]
    if not times:
        raise ValueError(f"no prompt came after {warm:.0f} s: simulate for longer, or at a higher load")
    rest = seconds - warm
    groups: list[list[float]] = [[] for _ in range(len(edges) + 1)]
    for _, spent, tokens in times:
        groups[bisect_right(edges, tokens)].append(spent)
    first = [spent for at, spent, _ in times if at < rest / 4]
    last = [spent for at, spent, _ in times if at >= 0.75 * rest]
    return PrefillStats(
        prompts=len(times),
        mean_s=fmean(spent for _, spent, _ in times),
        groups=tuple(GroupStats(len(group), _quantile(group, 0.5), _quantile(group, 0.99)) for group in groups),
        drift=fmean(last) / fmean(first) if first and last else 1.0,
        efficiency=run.efficiency,
        moves_per_minute=60 * moves / seconds,
    )


def _quantile(times: list[float], share: float) -> float:
    """0 of none."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
