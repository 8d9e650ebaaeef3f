"""The measurements of one dtype: each beside its floor, the two taken in turn in one process."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from v41.engine import Engine
from v41.machine import Bandwidth, prefill_floor
from v41.work import active_weights


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    rounds: int
    decode_steps: int
    context_tokens: int
    prompt_tokens: int
    chunk_tokens: int
    growth_tokens: int
    """Length of the long prompt, 0 for none; growth is its time over that of its first half."""

    @property
    def max_tokens(self) -> int:
        """Longest request."""
        return max(self.growth_tokens, self.prompt_tokens) + 64


FULL = Plan(2, 48, 512, 4096, 2048, 32768)
BF16 = Plan(1, 24, 512, 2048, 2048, 0)
QUICK = Plan(1, 12, 256, 1024, 512, 4096)


def say(text: str) -> None:
    """Progress, on stderr, with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def measure(directory: Path, config: dict[str, Any], dtype: str, plan: Plan) -> dict[str, Any]:
    """Everything about one dtype."""
    chunk = plan.chunk_tokens
    say(f"{dtype}: loading {directory}")
    engine = Engine(directory, dtype, chunk=chunk, max_tokens=plan.max_tokens)
    draw = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(3, config["text_config"]["vocab_size"] // 2) for _ in range(tokens)]

    weights = active_weights(config, torch.finfo(getattr(torch, dtype)).bits // 8)
    top = config["text_config"]["num_experts_per_tok"] * config["text_config"]["num_hidden_layers"]
    bandwidth = Bandwidth(weights.of(top))
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "active_weight_bytes": weights.of(top)}
    for batch in (1, 8):
        say(f"{dtype}: decode at batch {batch}")
        prompts = [prompt(plan.context_tokens) for _ in range(batch)]
        result[f"decode_{batch}"] = _decode(engine, prompts, plan.decode_steps, bandwidth, weights.of)
    result["prefill"] = _prefill(engine, config, dtype, plan, prompt)
    if plan.growth_tokens:
        say(f"{dtype}: a prompt of {plan.growth_tokens} tokens")
        engine.replay = False
        steps = engine.prefill(prompt(plan.growth_tokens))
        half = sum(steps[: len(steps) // 2])
        result["growth"] = {"tokens": plan.growth_tokens, "ratio": sum(steps) / half, "step_seconds": steps}
    return result


def _decode(
    engine: Engine, prompts: list[list[int]], steps: int, bandwidth: Bandwidth, bytes_of: Callable[[int], int]
) -> dict[str, Any]:
    """Each step against a reading of memory right after it."""
    seconds, floors = [], []
    for step in engine.decode(prompts, steps):
        seconds.append(step.seconds)
        floors.append(bytes_of(step.experts) / bandwidth.measure())
    return {
        "tokens_per_second": len(prompts) / median(seconds),
        "floor_tokens_per_second": len(prompts) / median(floors),
        "times_floor": median(s / f for s, f in zip(seconds, floors, strict=True)),
        "step_seconds": seconds,
        "floor_seconds": floors,
    }


def _prefill(
    engine: Engine, config: dict[str, Any], dtype: str, plan: Plan, prompt: Callable[[int], list[int]]
) -> dict[str, Any]:
    """All rows of all layers against the floor, and decoder-side replay against all rows, in turn."""
    tokens, all_rows, replayed, floors = plan.prompt_tokens, [], [], []
    for number in range(plan.rounds):
        say(f"{dtype}: floor of prefill, round {number + 1} of {plan.rounds}")
        floors.append(prefill_floor(config, tokens, plan.chunk_tokens, getattr(torch, dtype), repeats=3))
        for replay, times in ((False, all_rows), (True, replayed)):
            say(f"{dtype}: prefill of {tokens} tokens, replay {'on' if replay else 'off'}")
            engine.replay = replay
            times.append(sum(engine.prefill(prompt(tokens))))
    return {
        "tokens": tokens,
        "chunk_tokens": plan.chunk_tokens,
        "tokens_per_second": tokens / median(all_rows),
        "floor_tokens_per_second": tokens / median(f["seconds"] for f in floors),
        "times_floor": median(s / f["seconds"] for s, f in zip(all_rows, floors, strict=True)),
        "replay_tokens_per_second": tokens / median(replayed),
        "replay_share": median(on / off for on, off in zip(replayed, all_rows, strict=True)),
        "seconds": all_rows,
        "replay_seconds": replayed,
        "floors": floors,
    }
