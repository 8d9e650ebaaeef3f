"""Balancing rules of other routers that follow prefixes, from what they publish: for comparison only.

They keep what they have sent where, and take it to be cached there. Here nothing is ever evicted from that.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random

from deepinfer_router.pick import Pick
from deepinfer_router.target import Target
from deepinfer_router.work import Work
from deepinfer_simulator.baselines import least, requests


@dataclass(slots=True)
class TraceWork(Work):
    """Work whose prompt is known by its elements: a trace's blocks, or a text's characters."""

    elements: Sequence[Hashable] = ()


class PrefixTree:
    """Which prefixes have been sent to which targets. Targets are named by their place in the list."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Hashable], int] = {}  # (parent, element) -> node; the root is 0
        self._holders: list[set[int]] = [set()]

    def insert(self, elements: Sequence[Hashable], target: int) -> None:
        """`target` has got these."""
        node = 0
        for element in elements:
            key = (node, element)
            node = self._nodes.get(key, 0)
            if not node:
                node = self._nodes[key] = len(self._holders)
                self._holders.append(set())
            self._holders[node].add(target)

    def longest(self, elements: Sequence[Hashable]) -> tuple[int, set[int]]:
        """Elements of the longest prefix that any target has, and who has it."""
        node, found = 0, (0, set[int]())
        for depth, element in enumerate(elements, 1):
            node = self._nodes.get((node, element), 0)
            if not node:
                break
            found = depth, self._holders[node]
        return found

    def matches(self, elements: Sequence[Hashable], targets: int) -> list[int]:
        """Elements of the longest prefix of each target."""
        node, found = 0, [0] * targets
        for depth, element in enumerate(elements, 1):
            node = self._nodes.get((node, element), 0)
            if not node:
                break
            for target in self._holders[node]:
                found[target] = depth
        return found


class CacheAware:
    """vllm-project/router's `cache_aware`, with the defaults of its 0.1.17.

    Where loads differ by more than `absolute` and by `relative`: the least requests. Else the target that has most of
    the prompt, if it has more than `threshold` of it; else again the least requests, the first of equals. (Its page
    says "the smallest tree" for the last; a test looks at what 0.1.17 does.)
    """

    def __init__(self, threshold: float = 0.3, absolute: int = 64, relative: float = 1.5) -> None:
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._tree = PrefixTree()

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        if not targets:
            return None
        elements = _elements(work)
        counts = [target.active for target in targets]
        most, fewest = max(counts), min(counts)
        chosen, reason = counts.index(fewest), "least requests"
        if not (most - fewest > self._absolute and most > self._relative * fewest):
            matched, holders = self._tree.longest(elements)
            if matched > self._threshold * len(elements):
                chosen, reason = min(holders), "prefix"
        self._tree.insert(elements, chosen)
        return Pick(targets[chosen], reason)


class LMetric:
    """sgl-model-gateway's `lmetric`: least (tokens that are not cached there) * (requests there + 1)."""

    def __init__(self) -> None:
        self._tree = PrefixTree()

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        if not targets:
            return None
        elements = _elements(work)
        share = work.prompt_tokens / max(1, len(elements))
        matched = self._tree.matches(elements, len(targets))
        scores = [
            max(1.0, work.prompt_tokens - share * matched[index]) * (target.active + 1)
            for index, target in enumerate(targets)
        ]
        lowest = min(scores)
        chosen = rng.choice([index for index, score in enumerate(scores) if score == lowest])
        self._tree.insert(elements, chosen)
        return Pick(targets[chosen], "lmetric")


class ContextLengthAware:
    """llm-d's `context-length-aware` scorer beside its `active-request` scorer, equal weights, highest sum.

    Each engine is labelled once with a range of prompt lengths. `ranges`: (from, below) in tokens by engine id.
    """

    def __init__(self, ranges: dict[str, tuple[int, int]]) -> None:
        self._ranges = ranges

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        if not targets:
            return None
        most = max(1, max(requests(target) for target in targets))
        by_engine = {id: context_length_score(work.prompt_tokens, *limits) for id, limits in self._ranges.items()}

        def below_best(target: Target) -> float:
            return -by_engine[target.engine.id] - (most - target.active) / most

        return Pick(least(targets, below_best, rng), "context length")


def context_length_score(tokens: int, low: int, high: int) -> float:
    """1 for a narrow range with much room above; under 0.3, falling with the distance, outside of the range."""
    if low <= tokens < high:
        return 0.3 + 0.7 * (0.7 / (1 + (high - low) / 10_000) + 0.3 * (high - tokens) / high)
    distance = low - tokens if tokens < low else tokens - high
    return 0.3 / (1 + distance / 1000)


def _elements(work: Work) -> Sequence[Hashable]:
    if not isinstance(work, TraceWork):
        raise TypeError(f"{type(work).__name__} has no elements: a rule that follows prefixes needs a TraceWork")
    return work.elements
