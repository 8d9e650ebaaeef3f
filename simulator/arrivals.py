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


def poisson(
    requests: Sequence[TraceRequest],
    rate: float,
    seconds: float,
    rng: Random,
    weight: Callable[[TraceRequest, float], float] | None = None,
    windows: float = 0.0,
) -> Iterator[TraceRequest]:
    """Independent arrivals, `rate` a second for `seconds`: each a request drawn from the trace.

    With `weight(request, start)`, a request's chance is proportional to it; it is asked anew every `windows` seconds,
    with the window's start.
    """
    at, until, cumulative = 0.0, 0.0, list[float]()
    while (at := at + rng.expovariate(rate)) < seconds:
        if weight is None:
            chosen = requests[rng.randrange(len(requests))]
        else:
            if at >= until:
                start = at // windows * windows
                until = start + windows
                cumulative = list(accumulate(weight(request, start) for request in requests))
            chosen = requests[min(bisect_right(cumulative, rng.random() * cumulative[-1]), len(requests) - 1)]
        yield replace(chosen, at=at)


def shifting(long_tokens: int, factor: float, period: float) -> Callable[[TraceRequest, float], float]:
    """A weight for `poisson`: in every second period, prompts of `long_tokens` and more come `factor` times as
    often."""

    def weight(request: TraceRequest, start: float) -> float:
        shifted = int(start // period) % 2 == 1 and request.input_tokens >= long_tokens
        return factor if shifted else 1.0

    return weight
