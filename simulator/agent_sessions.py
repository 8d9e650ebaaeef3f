"""Sessions of coding agents, generated: prompts that grow by every answer and every tool's output.

The numbers are those of the 610 sessions of codex on SWE-bench Pro that vllm-project/router has as a test's data: 33
turns on average; first prompts of 10.6 to 12.2 thousand tokens that grow to 36 to 136 thousand; answers of mostly 30 to
700 tokens, with a tail to 11 thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from random import Random

from deepinfer_simulator.traces import BLOCK_TOKENS, TraceRequest

FIRST_PROMPT = (10_600, 12_200)
LAST_PROMPT = (36_000, 136_000)
TURNS = 33
ANSWER_MEDIAN = 145
"""Geometric mean of 30 and 700."""
ANSWER_SIGMA = 0.96
"""Of ln(tokens): 30 to 700 are then nine of ten answers."""
ANSWER_MEAN = ANSWER_MEDIAN * exp(ANSWER_SIGMA**2 / 2)
ANSWER_MOST = 11_000
TOKENS_PER_SECOND = 50.0
TOOL_SECONDS = 4.0
"""A tool's mean time. Assumed: the source has no times."""


def agent_sessions(sessions: int, seconds: float, rng: Random) -> list[TraceRequest]:
    """Requests of sessions that begin evenly at random within `seconds`, in order of time.

    A session's prompt begins with its last prompt and answer: their whole blocks keep their ids. All sessions share the
    8 first blocks, the agent's instructions.
    """
    ids = iter(range(1 << 62))
    shared = [next(ids) for _ in range(8)]
    found: list[TraceRequest] = []
    for number in range(sessions):
        found += _session(f"agent-{number}", rng.uniform(0, seconds), list(shared), ids, rng)
    return sorted(found, key=lambda request: request.at)


def _session(name: str, at: float, blocks: list[int], ids: Iterator[int], rng: Random) -> Iterator[TraceRequest]:
    prompt = rng.randint(*FIRST_PROMPT)
    last = rng.randint(*LAST_PROMPT)
    turns = max(2, round(rng.gammavariate(2.0, TURNS / 2.0)))
    growth = (last - prompt) / (turns - 1)
    for _ in range(turns):
        while len(blocks) < prompt // BLOCK_TOKENS:
            blocks.append(next(ids))
        answer = min(ANSWER_MOST, max(1, round(rng.lognormvariate(log(ANSWER_MEDIAN), ANSWER_SIGMA))))
        yield TraceRequest(at, prompt, answer, tuple(blocks), session=name)
        at += answer / TOKENS_PER_SECOND + rng.expovariate(1 / TOOL_SECONDS)
        prompt += answer + round(rng.expovariate(1 / max(1.0, growth - ANSWER_MEAN)))
