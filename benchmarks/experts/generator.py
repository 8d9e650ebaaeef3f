"""Skewed, drifting loads of experts, as a documented random process.

A layer's experts have a popularity, log-normal: its standard deviation in log space is `skew`. There are `topics`, each
a tilt of the popularity, log-normal with `tilt`. A running sequence has one topic and lives for a number of steps that
is geometric with mean `lifetime`; its topic is drawn from topic weights that wander in log space with a standing
deviation of `tide`; popularity wanders likewise, by `drift`; both return within about `memory` steps. A step's tokens
are split evenly among its sequences, and each layer's choices are one multinomial draw of `tokens` x `top` from the
mean of its sequences' distributions, which leaves out only that one token's experts differ.

How far things wander by default was set so that the rule of DeepInfer comes near to the figure that DeepSeek published
for its decode (1.090).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Traffic:
    """One kind of load; `tokens` and `sequences` are a step's, over all ranks, `lifetime` and `memory` steps."""

    tokens: int
    sequences: int
    lifetime: float
    skew: float = 0.8
    topics: int = 12
    tilt: float = 0.6
    tide: float = 0.35
    drift: float = 0.07
    memory: float = 20_000.0
    experts: int = 384
    top: int = 6


HOTTEST = 1 / 8
"""No expert takes more of the choices: a token goes to it once at most, and gives it a sixth of its own."""
REFRESH = 10
"""Steps between two positions of what wanders."""


def loads(traffic: Traffic, steps: np.ndarray, layers: int, seed: int) -> np.ndarray:
    """[len(steps), layers, experts] int32: loads of these steps, ascending, of a run that begins with step 0."""
    random = np.random.default_rng(seed)
    made = np.empty((len(steps), layers, traffic.experts), np.int32)
    last = int(steps[-1]) + 1
    mixtures = _mixtures(traffic, last, random)
    wanted = dict(zip(steps.tolist(), range(len(steps)), strict=True))
    for layer in range(layers):
        popularity = random.normal(0, traffic.skew, traffic.experts)
        tilts = random.normal(0, traffic.tilt, (traffic.topics, traffic.experts))
        place = _wander((traffic.experts,), traffic.drift, traffic.memory, random)
        for step in range(last):
            if step % REFRESH == 0:
                shares = np.exp(popularity + next(place) + tilts)
                shares /= shares.sum(1, keepdims=True)
            if step in wanted:
                mean = np.minimum(mixtures[step] @ shares, HOTTEST)
                made[wanted[step], layer] = random.multinomial(traffic.tokens * traffic.top, mean / mean.sum())
    return made


def topics_of_sequences(
    traffic: Traffic, steps: int, random: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each step the topic [sequences] of each, and which of them are new."""
    tide = _wander((traffic.topics,), traffic.tide, traffic.memory, random)
    topic = np.zeros(traffic.sequences, np.int64)
    new = np.ones(traffic.sequences, bool)
    for step in range(steps):
        if step % REFRESH == 0:
            weights = np.exp(next(tide))
            weights /= weights.sum()
        topic[new] = random.choice(traffic.topics, new.sum(), p=weights)
        yield topic, new
        new = random.random(traffic.sequences) < 1 / traffic.lifetime


def _mixtures(traffic: Traffic, steps: int, random: np.random.Generator) -> np.ndarray:
    """[steps, topics]: the part of a step's tokens that belongs to each topic."""
    each = (np.bincount(topic, minlength=traffic.topics) for topic, _ in topics_of_sequences(traffic, steps, random))
    return np.stack(list(each)) / traffic.sequences


def _wander(
    shape: tuple[int, ...], deviation: float, memory: float, random: np.random.Generator
) -> Iterator[np.ndarray]:
    """Positions of an Ornstein-Uhlenbeck process, one every REFRESH steps, from its standing distribution on."""
    keep = np.exp(-REFRESH / memory)
    place = random.normal(0, deviation, shape)
    while True:
        yield place
        place = keep * place + random.normal(0, deviation * np.sqrt(1 - keep**2), shape)
