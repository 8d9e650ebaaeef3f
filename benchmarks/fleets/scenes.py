"""What is simulated, by name, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer_router.decode_config import DecodeConfig
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_simulator.decode_case import DecodeCase
from deepinfer_simulator.prefill_case import PrefillCase
from deepinfer_simulator.traces import TraceRequest, read, scaled, with_hits

TRACE = Path(__file__).resolve().parent.parent / "traces" / "mooncake_conversation_trace.jsonl.gz"
LENGTHS = 2.5
"""Times the trace's: its prompts then fill all four groups. No public trace has prompts of 256K tokens."""
LOADS = {"mixed": (0.525, 0.55, 0.575, 0.6), "pools": (0.625, 0.65, 0.675, 0.7)}
"""With fixed chunks: where the highest stable one is looked for."""
OVERFLOWS = {
    "mixed": {"pools": False},
    "pools, no overflow": {"overflow": "none"},
    "pools": {},
}
"""Settings of the router's policy, by the name that tables give them."""
OTHERS = ("round-robin", "power-of-two", "least-requests", "cache-aware", "lmetric", "context-length-aware")

Case = DecodeCase | PrefillCase


def decode_scenes(steps: int) -> dict[str, DecodeCase]:
    """64 ranks. Rules of others know everything at once, which flatters them."""
    rules = ("random", "round-robin", "power-of-two", "least-requests", "least-kv", "cache-aware", "lmetric")
    scenes = {f"{rule}, exact": DecodeCase(rule, poll_s=0.0, steps=steps) for rule in (*rules, "least-score")}
    for replicas, poll_s in ((1, 0.2), (8, 0.2), (8, 1.0)):
        scenes[f"router x{replicas}, {poll_s:g} s"] = DecodeCase(replicas=replicas, poll_s=poll_s, steps=steps)
    for rule in ("least-score", "power-of-four-score"):
        scenes[f"{rule} x8, 0.2 s"] = DecodeCase(rule, replicas=8, steps=steps)
    scan = DecodeConfig(replicas=1)
    scenes["router x8 that scans all, 0.2 s"] = DecodeCase(replicas=8, steps=steps, config=scan)
    return scenes


def prefill_scenes(seconds: float) -> dict[str, PrefillCase]:
    """16 engines of 4 ranks, and 32 of one."""
    settings = {name: PrefillConfig.model_validate(changed) for name, changed in OVERFLOWS.items()}
    scenes: dict[str, PrefillCase] = {}
    for name, config in settings.items():
        for load in LOADS.get(name, (0.65,)):
            scenes[f"fixed {load:g}, {name}"] = PrefillCase(load=load, seconds=seconds, config=config)
        scenes[f"budget 0.75, {name}"] = PrefillCase(chunks="budget", load=0.75, seconds=seconds, config=config)
        scenes[f"budget shifting, {name}"] = PrefillCase(
            chunks="budget", load=0.686, seconds=seconds, shift=True, config=config
        )
        scenes[f"independent 0.8, {name}"] = PrefillCase(
            engines=32, ranks=1, chunks="whole", load=0.8, seconds=seconds, config=config
        )
    scenes["fixed 0.65, mixed"] = PrefillCase(load=0.65, seconds=seconds, config=settings["mixed"])
    for rule in OTHERS:
        scenes[f"fixed 0.55, {rule}"] = PrefillCase(rule, load=0.55, seconds=seconds)
    for rule in ("least-work", "least-requests", "power-of-two"):
        scenes[f"independent 0.8, {rule}"] = PrefillCase(
            rule, engines=32, ranks=1, chunks="whole", load=0.8, seconds=seconds
        )
    return scenes


def run_all(
    scenes: dict[str, Any], seeds: int, jobs: int, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """What each scene came to, seed by seed."""
    work = [(name, case, seed) for name, case in scenes.items() for seed in range(1, seeds + 1)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in scenes}
    for done, (name, result) in enumerate(_results(work, jobs), 1):
        found[name].append(result)
        if len(found[name]) == seeds:
            say(f"{done} of {len(work)} runs: {name}")
    return found


def _results(work: list[tuple[str, Case, int]], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if jobs == 1:
        yield from map(_run, work)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(_run, work)


def _run(one: tuple[str, Case, int]) -> tuple[str, dict[str, Any]]:
    name, case, seed = one
    conversation, longer = _traces()
    if isinstance(case, DecodeCase):
        return name, asdict(case.run(conversation, seed))
    found = case.run(longer, seed)
    return name, {**asdict(found), "stable": found.stable}


@cache
def _traces() -> tuple[list[TraceRequest], list[TraceRequest]]:
    conversation = read(TRACE)
    return conversation, scaled(with_hits(conversation), LENGTHS)
