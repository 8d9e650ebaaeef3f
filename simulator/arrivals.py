"""When requests arrive: as in the trace, or as a Poisson process over the trace's lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from deepinfer_simulator.traces import TraceRequest


def faster(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The trace as it was, in 1/`factor` of its time."""
    if factor <= 0:
        raise ValueError(f"the rate times {factor}: must be above 0")
    return [replace(request, at=request.at / factor) for request in requests]


def shuffled(requests: Sequence[TraceRequest], rate: float, seconds: float, rng: Random) -> Iterator[TraceRequest]:
    """A Poisson process of `rate` a second for `seconds`. It takes the trace's requests in random order, all of them
    before any comes again, so that runs differ little in how much work they have."""
    at, left = 0.0, list[TraceRequest]()
    while (at := at + rng.expovariate(rate)) < seconds:
        if not left:
            left = list(requests)
            rng.shuffle(left)
        yield replace(left.pop(), at=at)


def weighted(
    requests: Sequence[TraceRequest],
    rate: float,
    seconds: float,
    rng: Random,
    weight: Callable[[TraceRequest, float], float],
    window: float,
) -> Iterator[TraceRequest]:
    """A Poisson process whose requests are drawn with chances in proportion to `weight(request, start)`, which is asked
    anew every `window` seconds, with its start."""
    at, until, cumulative = 0.0, 0.0, list[float]()
    while (at := at + rng.expovariate(rate)) < seconds:
        if at >= until:
            start = at // window * window
            until = start + window
            cumulative = list(accumulate(weight(request, start) for request in requests))
        chosen = requests[min(bisect_right(cumulative, rng.random() * cumulative[-1]), len(requests) - 1)]
        yield replace(chosen, at=at)


def shifting(long_tokens: int, factor: float, period: float) -> Callable[[TraceRequest, float], float]:
    """A weight for `weighted`: in every second period, prompts of `long_tokens` and more come `factor` times as
    often."""

    def weight(request: TraceRequest, start: float) -> float:
        shifted = int(start // period) % 2 == 1 and request.input_tokens >= long_tokens
        return factor if shifted else 1.0

    return weight
