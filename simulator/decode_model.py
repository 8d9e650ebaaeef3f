"""Decode of many data-parallel ranks that step together, in a closed loop: what a balancing policy is worth.

Every rank of an expert-parallel group waits for the slowest in each step, so a step takes max over ranks of
`a + b * requests + c * KV tokens`. The balance is eta = sum of means / sum of maxima over the steps: 1 is perfect, and
at a fixed number of requests throughput is proportional to it.

The defaults are the decode step that vllm-project/router publishes for its program scheduling, with b and c over 4 (a
rank that shares its weights' time with three others); they rank policies and predict no machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from deepinfer_simulator.baselines_prefix import TraceWork
from deepinfer_simulator.decode_views import Loads, Views
from deepinfer_simulator.policy import Policy
from deepinfer_simulator.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a decode step: a + b * requests + c * KV tokens."""

    a: float = 0.0106
    b: float = 0.419e-3 / 4
    c: float = 1.42e-7 / 4


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What a run came to. Over the steps after the warm-up; loads are means over ranks."""

    eta: float
    steps: int
    finished: int
    """Requests, over the whole run."""
    tokens_per_second: float
    """Of one rank."""
    requests_spread: float
    """Mean over steps of the standard deviation over ranks, as a share of the mean."""
    kv_spread: float
    unplaced: int = 0
    """Picks that found every rank full; the request was tried again a step later."""


def decode(
    requests: Sequence[TraceRequest],
    policies: Sequence[Policy],
    views: Views,
    seed: int,
    *,
    per_rank: int = 60,
    steps: int = 2500,
    step_time: StepTime | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> DecodeResult:
    """Keep `per_rank` requests a rank in flight, drawn from the trace at random; each new one is placed by a policy.

    `policies`: one object a replica of the router, as `views.replicas`; every request comes through one of them at
    random. A rank gives each of its requests one token a step. The first third of the steps does not count.
    """
    rng = Random(seed)
    ranks, cost = views.ranks, step_time or StepTime()
    count: Loads = np.zeros(ranks, dtype=np.int64)
    kv: Loads = np.zeros(ranks, dtype=np.int64)
    ends: dict[int, list[tuple[int, Any, int]]] = {}
    output = sum(request.output_tokens for request in requests) / len(requests)
    works = [
        TraceWork(prompt_tokens=r.input_tokens, expected_output=round(output), elements=r.blocks) for r in requests
    ]
    now, finished, unplaced, vacant = 0.0, 0, 0, per_rank * ranks
    warm = steps // 3
    sums = np.zeros(5)
    for step in range(steps):
        views.tick(now, count, kv)
        for placed in range(vacant):
            which = rng.randrange(len(requests))
            replica = rng.randrange(views.replicas)
            pick = policies[replica].pick(works[which], views.targets(replica), now, rng)
            if pick is None:
                unplaced += vacant - placed
                break
            rank = pick.target.rank
            count[rank] += 1
            kv[rank] += requests[which].input_tokens
            booking = views.book(replica, pick.target, works[which])
            last = step + max(1, requests[which].output_tokens) - 1
            held = requests[which].input_tokens + max(1, requests[which].output_tokens)
            ends.setdefault(last, []).append((rank, booking, held))
        load = cost.a + cost.b * count + cost.c * kv
        slowest = float(load.max())
        now += slowest
        kv += count
        if step >= warm:
            sums += (load.mean(), slowest, count.sum(), count.std() / count.mean(), kv.std() / kv.mean())
        done = ends.pop(step, [])
        for rank, booking, held in done:
            count[rank] -= 1
            kv[rank] -= held
            views.release(booking)
        finished += len(done)
        vacant = per_rank * ranks - int(count.sum())
        progress(step + 1, steps)
    measured = steps - warm
    mean, most, tokens, spread, kv_spread = sums
    return DecodeResult(
        float(mean / most), measured, finished, tokens / ranks / most, spread / measured, kv_spread / measured, unplaced
    )
