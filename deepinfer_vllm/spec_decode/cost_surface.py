"""Seconds as a function of a size and of context tokens: measured at start, kept true by live times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Sample = tuple[int, int, float]
"""Size, context tokens, seconds."""

MAX_SECONDS = 3600.0
"""A time of more is an error of whoever measured."""
CONTEXTS = np.array([0.0, *(4.0**power for power in range(6, 14))])
"""Where context is tabulated; between 4,096 and 67,108,864 tokens every fourfold."""

_BATCH = 5  # times of a node whose median counts as one
_FINE = 1.1  # from node to node, where any size can be
_KEPT = 32.0  # medians that a node's mean remembers
_HALF_LIFE = 4000  # observations until a node that is not visited counts half
_CLIP = 0.25  # of the logarithm: the most that a median counts, and of a node without any eight times as much
_SURPRISE = 0.1  # of the logarithm: a median farther off says that costs have changed
_CALM = 500  # observations without such a one, after which the next begins another change
_OCTAVES, _STEPS = 0.7, 1.0  # how far along sizes and contexts a correction is believed
_EVERYWHERE = 0.02  # of it that is believed at any context
_PRIOR = 0.02  # nodes that the start's measurement counts as
_OWN = 1.0  # medians of a node that tell as much of it as is peculiar to it
_RIDGE = 0.006  # (what medians err by / how far shapes drift) ** 2, both relative: 0.016 and 0.2


class CostSurface:
    """Nodes of sizes and contexts, linear in between, and never falling along either.

    What was measured at start is multiplied by corrections. A node is corrected by the mean of its own recent medians
    of five, as far as it has them, else by those near it, else by all: so what is not visited drifts with what is.
    A median counts at most 28 % up or 22 % down, and outliers do not reach it. One thread.
    """

    def __init__(self, sizes: Sequence[int], start: Floats, padded_to: int = 0) -> None:
        """sizes: [G], rising; start: [G, 9] seconds at each size and each of `CONTEXTS`. Up to the size `padded_to` a
        batch costs what the next larger size does."""
        self.sizes = np.array(sizes, dtype=np.int64)
        self.padded_to = padded_to
        self.start = _rising(np.asarray(start, dtype=np.float64))
        self.seconds = self.start
        """[G, 9]: as now believed."""
        shape = self.start.shape
        self._weight, self._log = np.zeros(shape), np.zeros(shape)
        self._seen = np.zeros(shape)
        self._observed = 0
        self.surprises = 0
        """Medians that were more than a tenth off."""
        self._last_surprise = self._changed = -_CALM
        self._pending: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        octaves = np.subtract.outer(np.log2(self.sizes), np.log2(self.sizes)) / _OCTAVES
        steps = np.subtract.outer(np.arange(len(CONTEXTS)), np.arange(len(CONTEXTS))) / _STEPS
        self._near_sizes, self._near_contexts = np.exp(-(octaves**2) / 2), np.exp(-(steps**2) / 2) + _EVERYWHERE
        self._reach(int(self.sizes[-1]))

    @classmethod
    def measured(cls, samples: Iterable[Sample], padded_to: int = 0) -> CostSurface:
        """Of medians. Context costs what it was measured to at that size or the nearest where several were, else 0.

        ValueError without a usable sample.
        """
        times: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for size, context, seconds in samples:
            if usable(size, context, seconds):
                times[size][context].append(seconds)
        if not times:
            raise ValueError("no step was measured: a cost table needs at least one positive time of one size")
        sizes = sorted(times)
        points = {size: sorted((context, median(of)) for context, of in times[size].items()) for size in sizes}
        slopes = {
            size: max(0.0, (at[-1][1] - at[0][1]) / (at[-1][0] - at[0][0]))
            for size, at in points.items()
            if len(at) > 1
        }
        start = np.empty((len(sizes), len(CONTEXTS)))
        for row, size in enumerate(sizes):
            nearest = min(slopes, key=lambda other: abs(np.log(other / size)), default=None)
            context, seconds = points[size][0]
            slope = 0.0 if nearest is None else slopes[nearest]
            start[row] = np.maximum(seconds + slope * (CONTEXTS - context), 0.1 * seconds)
        finer = _finer(sizes, padded_to)
        return cls(finer, np.array([np.interp(finer, sizes, column) for column in start.T]).T, padded_to)

    def between(self, first: int, last: int, context_tokens: float) -> Floats:
        """[last - first + 1]: seconds of each size from `first` to `last`; those beyond all nodes on the last line."""
        if last >= len(self._lower):
            self._reach(2 * last)
        return self._expanded(self.seconds, slice(first, last + 1), context_tokens)

    def at(self, sizes: NDArray[np.int64], context_tokens: float) -> Floats:
        """[n]: seconds of sizes [n], rising."""
        if sizes[-1] >= len(self._lower):
            self._reach(2 * int(sizes[-1]))
        return self._expanded(self.seconds, sizes, context_tokens)

    def one(self, size: int, context_tokens: float) -> float:
        """What `between` says of a single size."""
        return self._single(self.seconds, size, context_tokens)

    def at_start(self, size: int, context_tokens: float) -> float:
        """The same, as it was measured at start."""
        return self._single(self.start, size, context_tokens)

    def _single(self, seconds: Floats, size: int, context_tokens: float) -> float:
        if size >= len(self._lower):
            self._reach(2 * size)
        left, part = _column(context_tokens)
        near, far = seconds[:, left], seconds[:, left + 1]
        low, high = int(self._lower[size]), int(self._upper[size])
        below = float(near[low]) + part * (float(far[low]) - float(near[low]))
        above = float(near[high]) + part * (float(far[high]) - float(near[high]))
        return below + float(self._part[size]) * (above - below)

    def observe(self, size: int, context_tokens: int, seconds: float) -> None:
        """A live time. What cannot be one is ignored."""
        if not usable(size, context_tokens, seconds):
            return
        if size >= len(self._lower):
            self._reach(2 * size)
        self._observed += 1
        expected = self.one(size, context_tokens)
        node = int(self._lower[size]) + int(self._part[size] >= 0.5), int(round(_context_place(context_tokens)))
        node = min(node[0], len(self.sizes) - 1), node[1]
        pending = self._pending[node]
        pending.append(float(np.log(seconds / expected * self.seconds[node] / self.start[node])))
        if len(pending) == _BATCH:
            self._learn(node, median(pending))
            pending.clear()

    def to_json(self) -> dict[str, Any]:
        """All but the times that wait for their median."""
        arrays = {
            "start": self.start,
            "seconds": self.seconds,
            "weight": self._weight,
            "log": self._log,
            "seen": self._seen,
        }
        return {
            "sizes": self.sizes.tolist(),
            "padded_to": self.padded_to,
            "observed": self._observed,
            **{name: array.tolist() for name, array in arrays.items()},
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> CostSurface:
        """What `to_json` gave. ValueError if it is something else."""
        try:
            surface = cls(found["sizes"], np.array(found["start"]), int(found["padded_to"]))
            shape = surface.start.shape
            surface.seconds, surface._weight, surface._log, surface._seen = (
                np.array(found[name], dtype=np.float64).reshape(shape) for name in ("seconds", "weight", "log", "seen")
            )
            surface._observed = int(found["observed"])
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a cost table: {type(error).__name__} {error}") from error
        return surface

    def _learn(self, node: tuple[int, int], seen: float) -> None:
        weight = self._weight[node] * 0.5 ** ((self._observed - self._seen[node]) / _HALF_LIFE)
        believed = float(np.log(self.seconds[node] / self.start[node]))
        before = self._log[node] if weight > 0.0 else believed
        clip = _CLIP if weight >= 1.0 else 8 * _CLIP
        if abs(seen - believed) > _SURPRISE:
            self._surprised()
            weight /= 2
        self._weight[node] = min(weight + 1.0, _KEPT)
        self._log[node] = before + (min(max(seen, before - clip), before + clip) - before) / self._weight[node]
        self._seen[node] = self._observed
        self._correct()

    def _surprised(self) -> None:
        """What was learnt before costs began to change counts half."""
        if self._observed - self._last_surprise > _CALM:
            self._changed = self._observed
        self._last_surprise = self._observed
        self.surprises += 1
        self._weight[self._seen < self._changed] /= 2

    def _correct(self) -> None:
        weight = self._weight * 0.5 ** ((self._observed - self._seen) / _HALF_LIFE)
        heard = weight / (weight + _OWN)
        trend = self._trend(heard)
        beside = self._log - np.log(trend)
        near = self._near_sizes @ heard @ self._near_contexts
        shared = self._near_sizes @ (heard * beside) @ self._near_contexts / (near + _PRIOR)
        self.seconds = _rising(self.start * trend * np.exp(shared + heard * (beside - shared)))

    def _trend(self, heard: Floats) -> Floats:
        """[G, 9]: the ratios to the start's if what changed is a factor and a time per token: ridge regression."""
        ratio, per_token = np.exp(self._log), self.sizes[:, None] / self.start

        def total(values: Floats) -> Floats:
            return np.sum(heard * values, axis=0) @ self._near_contexts

        count = np.maximum(total(np.ones_like(ratio)), 1e-9)
        centre, mean = total(per_token) / count, total(ratio) / count
        slope = (total(ratio * per_token) - count * centre * mean) / (
            np.maximum(total(per_token**2) - count * centre**2, 0.0) + _RIDGE * centre**2 + 1e-30
        )
        level = (count * mean + _PRIOR) / (count + _PRIOR)
        return np.clip(level + slope * (per_token - centre), 0.2 * level, 5.0 * level)

    def _expanded(self, seconds: Floats, sizes: slice | NDArray[np.int64], context_tokens: float) -> Floats:
        left, part = _column(context_tokens)
        row = seconds[:, left] + part * (seconds[:, left + 1] - seconds[:, left])
        below = row[self._lower[sizes]]
        return below + self._part[sizes] * (row[self._upper[sizes]] - below)

    def _reach(self, size: int) -> None:
        """Where sizes up to this one lie between nodes."""
        values = np.arange(size + 1)
        last = len(self.sizes) - 1
        above = np.searchsorted(self.sizes, values)
        self._lower = np.clip(above - 1, 0, max(0, last - 1))
        self._upper = np.minimum(self._lower + 1, last)
        apart = np.maximum(self.sizes[self._upper] - self.sizes[self._lower], 1)
        self._part = np.maximum((values - self.sizes[self._lower]) / apart, 0.0)
        padded = (values <= self.padded_to) & (values <= self.sizes[-1])
        self._part[padded] = (above - self._lower)[padded]


def usable(size: int, context_tokens: int, seconds: float) -> bool:
    """Whether this can be a measured step."""
    return size >= 1 and context_tokens >= 0 and 0.0 < seconds <= MAX_SECONDS


def _finer(sizes: list[int], padded_to: int) -> list[int]:
    """With more sizes where the next is more than a tenth larger and batches are not padded to it."""
    found = sizes[:1]
    for size in sizes[1:]:
        while found[-1] >= padded_to and size > (following := max(found[-1] + 1, int(found[-1] * _FINE))):
            found.append(following)
        found.append(size)
    return found


def _column(context_tokens: float) -> tuple[int, float]:
    """Index in `CONTEXTS` to the left of it, and how far it is from there to the next."""
    left = min(int(_context_place(context_tokens)), len(CONTEXTS) - 2)
    from_tokens, to_tokens = float(CONTEXTS[left]), float(CONTEXTS[left + 1])
    return left, min((context_tokens - from_tokens) / (to_tokens - from_tokens), 1.0)


def _context_place(context_tokens: float) -> float:
    """Index in `CONTEXTS`, with a fraction in logarithm; below 4,096 linear."""
    if context_tokens <= CONTEXTS[1]:
        return context_tokens / float(CONTEXTS[1])
    return min(float(np.log(context_tokens)) / float(np.log(4.0)) - 5.0, len(CONTEXTS) - 1.0)


def _rising(seconds: Floats) -> Floats:
    return np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
