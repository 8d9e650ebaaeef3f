"""Balancing rules of other routers, written from what they publish, in the shape of ours: for comparison only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from deepinfer_router.pick import Pick
from deepinfer_router.target import Target
from deepinfer_router.work import Work

Score = Callable[[Target], float]


def requests(target: Target) -> float:
    """Requests there."""
    return target.active


def kv_tokens(target: Target) -> float:
    """KV tokens there."""
    return target.kv_tokens


def pending_seconds(target: Target) -> float:
    """Predicted seconds of prefill there."""
    return target.pending_seconds


def active_and_kv(weight: float) -> Score:
    """Requests plus `weight` times KV tokens: the decode score of the router."""
    return lambda target: target.active + weight * target.kv_tokens


class RandomChoice:
    """Any target, evenly."""

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        return Pick(targets[rng.randrange(len(targets))], "random") if targets else None


class RoundRobin:
    """The next target in turn."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        if not targets:
            return None
        chosen = targets[self._next % len(targets)]
        self._next += 1
        return Pick(chosen, "round robin")


class Least:
    """The target of the least score; among equals, any."""

    def __init__(self, score: Score) -> None:
        self._score = score

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        return Pick(least(targets, self._score, rng), "least") if targets else None


class PowerOf:
    """Of `choices` targets drawn at random, the one of the least score."""

    def __init__(self, choices: int, score: Score) -> None:
        self._choices, self._score = choices, score

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        if not targets:
            return None
        drawn = targets if len(targets) <= self._choices else rng.sample(targets, self._choices)
        return Pick(min(drawn, key=self._score), f"best of {len(drawn)}")


def least(targets: Sequence[Target], score: Score, rng: Random) -> Target:
    """The target of the least score; among equals, any."""
    scores = [score(target) for target in targets]
    lowest = min(scores)
    if scores.count(lowest) == 1:
        return targets[scores.index(lowest)]
    return targets[rng.choice([index for index, found in enumerate(scores) if found == lowest])]
