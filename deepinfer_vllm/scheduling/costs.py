"""What is known of an engine's steps: read from a file, learnt while it serves, written back."""

import threading
from collections import deque
from collections.abc import Callable
from math import ceil
from pathlib import Path

from deepinfer_costmodel.cost import Cost, CostError
from deepinfer_costmodel.priors import PUBLISHED
from deepinfer_costmodel.step import Load, StepCost
from deepinfer_costmodel.step_fit import StepFit
from deepinfer_costmodel.step_table import StepTable, read_step_table
from deepinfer_vllm.scheduling.costs_file import rewrite

_TAIL = 0.99
_TAIL_OF, _TAIL_FROM = 256, 32
_TAIL_LIMITS = (0.8, 1.5)
_WRITE_FIRST, _WRITE_EVERY = 64, 2048
"""Steps. Between them it is written whenever their number has doubled: `vllm serve` kills engines at their end."""


class Costs:
    """Coefficients of one mode of one engine, and how far off they are. One thread; files are written in another."""

    def __init__(self, mode: str, cap_tokens: int | None, file: str, source: str, warn: Callable[[str], None]) -> None:
        """mode: "replay" or "full"; cap_tokens: see `Cost`; file: "" for none, and need not be there yet; source: what
        to say of these coefficients there. Never raises for what a disk does or a file holds: it warns."""
        self._mode, self._path, self._source, self._warn = mode, Path(file) if file else None, source, warn
        self._table = self._read()
        seed = None if self._table is None else self._table.costs.get(mode)
        if seed is not None and seed.prefill.cap_tokens != cap_tokens:
            warn(f"{file}: costs {mode!r} are of a model whose index selects {seed.prefill.cap_tokens}; not used")
            seed = None
        self._fit = StepFit(seed or _prior(cap_tokens))
        self._ratios: deque[float] = deque(maxlen=_TAIL_OF)
        self._written = 0
        self.tail = 1.0
        """What 99 of 100 steps take at most, of what they were predicted to; of the steps with prefills and decodes."""
        self.most_tokens = 0
        """Of chunks in a step, as far as any has been seen."""

    @property
    def now(self) -> StepCost:
        """As now believed."""
        return self._fit.cost

    @property
    def error(self) -> float | None:
        """Median of |predicted - measured| / measured of the last 64 steps."""
        return self._fit.error

    @property
    def due(self) -> bool:
        """Whether `refit` has something new to go by."""
        return self._fit.due

    def observe(self, load: Load, predicted_s: float, seconds: float) -> None:
        """A step took `seconds`; takes some microseconds."""
        if not self._fit.observe(load, seconds):
            return
        if load.chunks:
            self.most_tokens = max(self.most_tokens, load.tokens)
            if load.decodes:
                self._ratios.append(seconds / predicted_s)

    def refit(self) -> None:
        """Learn from what has been observed; takes some milliseconds, so call it while a step runs."""
        self._fit.refit()
        if len(self._ratios) >= _TAIL_FROM:
            ratio = sorted(self._ratios)[ceil(_TAIL * len(self._ratios)) - 1]
            self.tail = min(max(ratio, _TAIL_LIMITS[0]), _TAIL_LIMITS[1])
        learnt = self._fit.observations - self._written
        if self._path is not None and learnt >= min(max(self._written, _WRITE_FIRST), _WRITE_EVERY):
            threading.Thread(target=self._put, args=self._taken(), name="deepinfer-costs", daemon=True).start()

    def write(self) -> None:
        """Into the file, if there is one and something has been learnt."""
        if self._path is not None and self._fit.observations != self._written:
            self._put(*self._taken())

    def _taken(self) -> tuple[StepCost, int]:
        """What is to be written, and after how many steps; it counts as written."""
        self._written = self._fit.observations
        return self._fit.cost, self._written

    def _put(self, cost: StepCost, steps: int) -> None:
        assert self._path is not None
        source = f"{self._source}; fitted to {steps} steps"
        try:
            rewrite(self._path, lambda: (self._read() or StepTable({}, {})).having(self._mode, cost, source))
        except OSError as error:
            self._warn(f"costs of steps are not written: {error}")

    def _read(self) -> StepTable | None:
        if self._path is None:
            return None
        try:
            return read_step_table(self._path)
        except FileNotFoundError:
            return None
        except (CostError, OSError) as error:
            self._warn(f"costs of steps are not read: {error}")
            return None


def _prior(cap_tokens: int | None) -> StepCost:
    """Of a published engine; the first step that is measured sets the scale, and some hundred all else."""
    if cap_tokens is None:
        return StepCost.of(PUBLISHED)
    return StepCost.of(
        Cost(PUBLISHED.alpha, PUBLISHED.beta, PUBLISHED.gamma, cap_tokens=cap_tokens, index=PUBLISHED.gamma / 10)
    )
