"""The points of a sweep: how fast requests come, how many at a time, and of which lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, isfinite
from typing import TypeVar

from deepinfer_vllm.evaluation.errors import EvaluationError

SLO_METRICS = ("ttft", "tpot", "e2el")
"""For which `vllm bench serve` counts goodput."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Point:
    """One run of `vllm bench serve`. None: left to its dataset, or unbounded."""

    rate: float
    """Requests a second; inf: all at once."""
    concurrency: int | None
    """At most so many at a time."""
    input_tokens: int | None
    output_tokens: int | None

    @property
    def name(self) -> str:
        """Of its files."""
        lengths = f"in-{self.input_tokens or 'any'}_out-{self.output_tokens or 'any'}"
        return f"{lengths}_rate-{self.rate:g}_at-once-{self.concurrency or 'all'}"

    @property
    def curve(self) -> str:
        """Points of the same lengths are one curve; how it is called."""
        return f"{self.input_tokens or 'any'} in, {self.output_tokens or 'any'} out"

    def flags(self) -> list[str]:
        """For `vllm bench serve`."""
        given = {
            "--request-rate": f"{self.rate:g}",
            "--max-concurrency": self.concurrency,
            "--input-len": self.input_tokens,
            "--output-len": self.output_tokens,
        }
        return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


def grid(rates: str, concurrencies: str, inputs: str, outputs: str) -> list[Point]:
    """Every combination, lengths outermost, lighter loads first. Raises EvaluationError."""
    lengths = product(_counts("--input-len", inputs), _counts("--output-len", outputs))
    at_once = _counts("--concurrency", concurrencies)
    loads = list(product(_numbers("--rates", rates, float) or [inf], at_once))
    return [Point(rate, limit, *of) for of in lengths for rate, limit in sorted(loads, key=_load)]


def _load(pair: tuple[float, int | None]) -> tuple[float, float]:
    return pair[0], inf if pair[1] is None else pair[1]


def _counts(flag: str, text: str) -> Sequence[int | None]:
    """[None]: nothing said."""
    return _numbers(flag, text, int) or [None]


def _numbers(flag: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    numbers: list[Number] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            number = kind(part)
        except ValueError:
            raise EvaluationError(f"{flag} {part!r} is no number; give some with commas between: 1,2,4") from None
        if not number > 0 or (kind is int and not isfinite(number)):
            raise EvaluationError(f"{flag} {part}: above 0 is needed")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def objectives(text: str) -> dict[str, float]:
    """Milliseconds by metric, of "ttft:2000,tpot:50". Raises EvaluationError."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        metric, colon, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if metric not in SLO_METRICS or not colon or not 0 < limit < inf:
            raise EvaluationError(f"--slo {part!r}: METRIC:MILLISECONDS of {', '.join(SLO_METRICS)}: tpot:50")
        found[metric] = limit
    return found
