"""How many engines one stage needs: up at once, down a step at a time and only when nothing speaks against it."""

from collections import deque
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, NamedTuple

_HISTORY = 256  # points of time of the past that are told apart


class Limits(NamedTuple):
    """An AutoscaleConfig, which says what each means, of plain types: the process that recommends has no pydantic."""

    target_utilisation: float
    sequences_per_rank: float
    quota_utilisation: float
    startup_s: float
    spare_fraction: float
    down_after_s: float
    backlog_s: float
    smoothing_s: float
    min_engines: int
    max_engines: int | None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """For one stage."""

    engines: int
    """That get work now."""
    desired: int
    """That there should be."""
    utilisation: float
    """Of what the engines can do, the part in use."""
    need: float
    """Engines that the demand would keep as busy as they are to be, before spares and bounds."""
    reason: str
    """Why `desired` is what it is."""
    blocked: str
    """Why it is not lower; empty: it need not be."""

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


class StageScale:
    """One stage's recommendations over time. `now`: seconds of a steady clock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._needs: deque[tuple[float, float]] = deque()
        self._desired = 0
        self._lowered_at: float | None = None

    def update(self, engines: int, ill: int, used: float, now: float) -> Recommendation:
        """`engines` get work and `ill` do not; what is asked of them would fully use `used` engines."""
        limits = self._limits
        if self._lowered_at is None or engines > self._desired + 1:  # somebody has started more than was asked for
            self._lowered_at, self._desired = now, engines
        need = used / limits.target_utilisation
        ahead = self._ahead(need, now)
        utilisation = used / engines if engines else float(used > 0)
        wanted = self._bounded(self._with_spare(ahead))
        if wanted >= self._desired:
            if wanted > self._desired or engines < wanted:
                reason = "demand grows" if ahead > need else "demand"
            else:
                reason = "enough"
            if wanted > self._desired:
                self._lowered_at = now  # what has just been asked for is not taken back at once
            self._desired = wanted
            return Recommendation(engines, wanted, utilisation, need, reason, "")
        blocked = self._blocked(engines, ill, used, utilisation, now)
        if not blocked:
            self._desired, self._lowered_at = self._desired - 1, now
            if self._desired > wanted:
                blocked = "one step at a time"
        return Recommendation(engines, self._desired, utilisation, need, "less demand", blocked)

    def _blocked(self, engines: int, ill: int, used: float, utilisation: float, now: float) -> str:
        limits = self._limits
        assert self._lowered_at is not None
        if utilisation > limits.quota_utilisation:
            return "quota utilisation"
        if ill:
            return "engines are ill"
        if engines > self._desired:
            return "the last step is not done"
        if now - self._lowered_at < limits.down_after_s:
            return "too soon after the last change"
        peak = max(need for _, need in self._needs)
        if self._bounded(self._with_spare(peak)) >= self._desired:
            return "needed a little while ago"
        if used > limits.target_utilisation * (self._desired - 1):
            return "the others would be too busy"
        return ""

    def _ahead(self, need: float, now: float) -> float:
        """The need when an engine asked for now would serve, if it goes on growing as it has."""
        limits = self._limits
        horizon_s = max(limits.startup_s, limits.down_after_s)
        if self._needs and now - self._needs[-1][0] < horizon_s / _HISTORY:
            self._needs[-1] = self._needs[-1][0], max(need, self._needs[-1][1])
        else:
            self._needs.append((now, need))
        while now - self._needs[0][0] > horizon_s:
            self._needs.popleft()
        start = max(self._needs[0][0], now - limits.startup_s)
        if now - start < max(1.0, 0.5 * limits.startup_s):
            return need  # too short a time to tell growth from noise
        middle = 0.5 * (start + now)
        older = [n for at, n in self._needs if start <= at < middle]
        newer = [n for at, n in self._needs if at >= middle]
        if not older:
            return need
        mean = sum(newer) / len(newer)
        growth_per_s = (mean - sum(older) / len(older)) / (now - middle)
        return max(need, mean + growth_per_s * (0.5 * (now - middle) + limits.startup_s))

    def _with_spare(self, need: float) -> int:
        least = ceil(need - 1e-9)
        return least + max(1, ceil(self._limits.spare_fraction * least)) if least else 0

    def _bounded(self, engines: int) -> int:
        limits = self._limits
        most = engines if limits.max_engines is None else limits.max_engines
        return max(limits.min_engines, min(engines, most))
