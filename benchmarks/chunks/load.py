"""The load: requests that decode all the time, and prompts of all lengths that come by ones and by threes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

STREAM_PROMPT, STREAM_ANSWER = 48, 9000
SHORT, LONG, PROMPT_ANSWER = (256, 2048), 10_240, 4
"""Tokens of prompts: nineteen short ones, even by logarithm, to one that is long."""
CYCLE = 20
BACKLOGS = (1, 3)
"""Prompts that are there at a time, in turn for four of them."""
VOCABULARY = 900


def prompt_lengths(cycles: int, seed: int) -> list[int]:
    """Lengths of nineteen short prompts and a long one in any order, so many times."""
    rng, lengths = Random(seed), []
    for _ in range(cycles):
        cycle = [int(SHORT[0] * (SHORT[1] / SHORT[0]) ** rng.random()) for _ in range(CYCLE - 1)]
        cycle.append(LONG)
        rng.shuffle(cycle)
        lengths += cycle
    return lengths


@dataclass
class Measured:
    """What a stretch of the load took."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    intervals: list[float] = field(default_factory=list)
    """Seconds between two tokens of a request, of all requests."""
    answers: list[list[int]] = field(default_factory=list)
    """Of the prompts, in order."""


class Load:
    """Drives an engine of vLLM in this process, one step at a time."""

    def __init__(self, engine: Any, streams: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._streams, self._clock = engine, streams, clock
        self._rng, self._made = Random(0), 0
        self._last: dict[str, float] = {}
        self._answers: dict[str, list[int]] = {}
        self._prompts_out: set[str] = set()
        self._streams_out: set[str] = set()

    def run(self, lengths: list[int], seed: int) -> Measured:
        """Until all these prompts are answered; streams go on over the end."""
        rng, names, measured = Random(seed), [], Measured(prompt_tokens=sum(lengths))
        left = list(enumerate(lengths))
        began = self._clock()
        while left or self._prompts_out:
            wanted = BACKLOGS[len(names) // 4 % 2]
            while left and len(self._prompts_out) < wanted:
                names.append(self._add(left.pop(0)[1], PROMPT_ANSWER, rng, self._prompts_out))
            while len(self._streams_out) < self._streams:
                self._add(STREAM_PROMPT, STREAM_ANSWER, self._rng, self._streams_out)
            self._step(measured)
        measured.seconds = self._clock() - began
        measured.answers = [self._answers.pop(name) for name in names]
        return measured

    def decode_step(self, count: int) -> float:
        """Median seconds of `count` steps in which only streams run."""
        while len(self._streams_out) < self._streams:
            self._add(STREAM_PROMPT, STREAM_ANSWER, self._rng, self._streams_out)
        took = []
        for _ in range(self._streams + count):
            began = self._clock()
            self._step(Measured())
            took.append(self._clock() - began)
        return sorted(took[-count:])[count // 2]

    def _add(self, tokens: int, answer: int, rng: Random, out: set[str]) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"r{self._made}"
        self._made += 1
        params = SamplingParams(
            temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        ids = [rng.randrange(VOCABULARY) for _ in range(tokens)]
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        out.add(name)
        self._answers[name] = []
        return name

    def _step(self, measured: Measured) -> None:
        outputs = self._engine.step()
        now = self._clock()
        for output in outputs:
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            self._answers[name] += tokens
            if tokens and name in self._last:
                measured.intervals.append(now - self._last[name])
            self._last[name] = now
            if output.finished:
                self._prompts_out.discard(name)
                if name in self._streams_out:
                    self._streams_out.discard(name)
                    del self._answers[name]
                del self._last[name]
