"""Skewed, drifting loads of experts, as a documented random process.

A layer's experts have a popularity, log-normal: its standard deviation in log space is `skew`. There are `topics`, each
a tilt of the popularity, log-normal with `tilt`. A running sequence has one topic and lives for a number of steps that
is geometric with mean `lifetime`; its topic is drawn from topic weights that walk in log space, back to zero within
about `memory` steps and with a standing deviation of `tide`; popularity itself walks likewise by `drift`. A step's
tokens are split among its sequences evenly, and each layer's choices are one multinomial draw from the mean of its
sequences' distributions: `tokens` x `top` choices, which leaves out only that one token chooses different experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Traffic:
    """One kind of load; `tokens` is a step's, over all ranks."""

    tokens: int
    sequences: int
    lifetime: float
    skew: float = 0.8
    topics: int = 12
    tilt: float = 0.6
    tide: float = 0.5
    memory: float = 20000.0
    drift: float = 0.15
    experts: int = 384
    top: int = 6


HOTTEST = 1 / 8
"""No expert takes more of the choices: a token goes to it once at most, and gives it a sixth of its own."""


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
        wander = _walk((traffic.experts,), traffic.drift, traffic.memory, random)
        for step in range(last):
            if step % REFRESH == 0:
                logits = popularity + next(wander) + tilts
                shares = np.exp(logits)
                shares /= shares.sum(1, keepdims=True)
            if step in wanted:
                mean = np.minimum(mixtures[step] @ shares, HOTTEST)
                made[wanted[step], layer] = random.multinomial(traffic.tokens * traffic.top, mean / mean.sum())
    return made


REFRESH = 10
"""Steps between two positions of what walks."""


def _walk(shape: tuple[int, ...], deviation: float, memory: float, random: np.random.Generator):  # noqa: ANN202
    """Positions of an Ornstein-Uhlenbeck process, one every REFRESH steps, from its standing distribution on."""
    keep = np.exp(-REFRESH / memory)
    place = random.normal(0, deviation, shape)
    while True:
        yield place
        place = keep * place + random.normal(0, deviation * np.sqrt(1 - keep**2), shape)


def _mixtures(traffic: Traffic, steps: int, random: np.random.Generator) -> np.ndarray:
    """[steps, topics]: the part of a step's tokens that belongs to each topic."""
    tide = _walk((traffic.topics,), traffic.tide, traffic.memory, random)
    topic = np.zeros(traffic.sequences, np.int64)
    ends = np.ones(traffic.sequences, bool)
    made = np.empty((steps, traffic.topics))
    for step in range(steps):
        if step % REFRESH == 0:
            weights = np.exp(next(tide))
            weights /= weights.sum()
        topic[ends] = random.choice(traffic.topics, ends.sum(), p=weights)
        made[step] = np.bincount(topic, minlength=traffic.topics) / traffic.sequences
        ends = random.random(traffic.sequences) < 1 / traffic.lifetime
    return made
