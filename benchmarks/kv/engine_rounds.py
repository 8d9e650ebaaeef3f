"""The two measurements inside engines, each in turn with what stands against it."""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kv.contender import drop_page_cache
from kv.engine import Engine

WARM_UP_TOKENS = 256
VOCABULARY = 256
"""Tokens drawn for prompts: every preset has as many."""


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    shared_tokens: int
    tail_tokens: int
    """After the shared part, another in each round."""
    rounds: int
    decode_prompt_tokens: int
    decode_tokens: int
    decode_rounds: int

    @property
    def max_tokens(self) -> int:
        """Longest request."""
        return max(self.shared_tokens + self.tail_tokens, self.decode_prompt_tokens + self.decode_tokens) + 8


def say(text: str) -> None:
    """Progress, on stderr, with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def measure(checkpoint: Path, scratch: Path, plan: Plan) -> dict[str, Any]:
    """Everything; stores and their indexes lie in `scratch`."""
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    return {
        "plan": asdict(plan),
        "first_token": _first_token(checkpoint, scratch / "shared", plan),
        "decode": _decode(checkpoint, scratch / "decode", plan),
    }


def _first_token(checkpoint: Path, root: Path, plan: Plan) -> list[dict[str, float]]:
    """Seconds to the first token of each round's prompt: computed, and with its shared part from slabs."""
    root.mkdir()
    shared, rounds = _prompt("shared", plan.shared_tokens), []
    say(f"an engine computes and stores {plan.shared_tokens} tokens")
    with Engine(checkpoint, plan.max_tokens, root) as engine:
        engine.ask(shared, 1)
    for number in range(plan.rounds):
        prompt = shared + _prompt(f"tail {number}", plan.tail_tokens)
        found: dict[str, float] = {}
        for name, store in _in_turn({"computed": None, "from_store": root}, number):
            say(f"first token, round {number + 1} of {plan.rounds}: {name}")
            drop_page_cache(list(root.rglob("*.slab")))
            with Engine(checkpoint, plan.max_tokens, store) as engine:
                engine.ask(_prompt(f"warm-up {number}", WARM_UP_TOKENS), 2)
                answer = engine.ask(prompt, 1)
            found[name], found[f"{name}_cached_tokens"] = answer["arrivals"][0], answer["cached_tokens"]
        if found["computed_cached_tokens"] or not found["from_store_cached_tokens"]:
            raise RuntimeError(f"The store's hits are not what is measured: {found}")
        rounds.append(found)
    return rounds


def _decode(checkpoint: Path, root: Path, plan: Plan) -> list[dict[str, float]]:
    """Seconds a token after the first, of prompts that nobody has stored, with stores running and without.

    One engine does both, in short turns: two engines differ in more than what is measured. Without stores its connector
    still plans each step, so what that takes is told too.
    """
    root.mkdir()
    rounds = []
    say("an engine with the store starts")
    with Engine(checkpoint, plan.max_tokens, root) as engine:
        for number in range(plan.decode_rounds + 1):  # the first warms up
            say(f"decode, round {number} of {plan.decode_rounds}")
            found: dict[str, float] = {}
            for name, stores in _in_turn({"off": False, "on": True}, number):
                prompt = _prompt(f"decode {number} {name}", plan.decode_prompt_tokens)
                answer = engine.ask(prompt, plan.decode_tokens, stores=stores)
                arrivals, tokens = answer["arrivals"], plan.decode_tokens - 1
                found[name] = (arrivals[-1] - arrivals[0]) / tokens
                found[f"{name}_connector"] = answer["connector_seconds"] / tokens
                found[f"{name}_stored_blocks"] = answer["stored_blocks"]
            if found["off_stored_blocks"] or not found["on_stored_blocks"]:
                raise RuntimeError(f"Not one turn with stores and one without: {found}")
            if number:
                rounds.append(found)
    return rounds


def _in_turn(sides: dict[str, Any], number: int) -> list[tuple[str, Any]]:
    """Both, and another first in every round."""
    return list(sides.items())[:: -1 if number % 2 else 1]


def _prompt(name: str, tokens: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(3, VOCABULARY) for _ in range(tokens)]
