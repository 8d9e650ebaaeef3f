"""Measured times on their way to a cost table, so that the tables of all ranks are told the same."""

from typing import Any, Literal, NamedTuple, Protocol

SHARED_EVERY = 16
"""Steps after which the ranks of a group take over what the first of them measured. A single rank does not wait."""


class Time(NamedTuple):
    """What a part of a step took."""

    part: Literal["verify", "plain", "draft"]
    size: int
    """Tokens of a step; requests of a plain one, or drafted for."""
    context_tokens: int
    """Of the batch."""
    seconds: float


class Learns(Protocol):
    """Takes times of steps: a `Controller`."""

    def observe_verify(self, tokens: int, context_tokens: int, seconds: float) -> None: ...

    def observe_plain(self, requests: int, context_tokens: int, seconds: float) -> None: ...

    def observe_draft(self, requests: int, context_tokens: int, seconds: float) -> None: ...


class Ranks(Protocol):
    """Several processes that must decide alike: vLLM's tensor-parallel group."""

    world_size: int

    def broadcast_object(self, obj: Any, src: int = 0) -> Any: ...


class SharedTimes:
    """Keeps times until every rank can have them."""

    def __init__(self, learns: Learns, ranks: Ranks | None = None) -> None:
        self._learns = learns
        self._ranks = ranks if ranks is not None and ranks.world_size > 1 else None
        self._waiting: list[Time] = []
        self._steps = 0

    def tell(self, *times: Time) -> None:
        """What this rank has measured."""
        self._waiting += times
        if self._ranks is None:
            self._flush()

    def begin_step(self) -> None:
        """A step begins: a collective call, of every rank and in the same steps."""
        self._steps += 1
        if self._ranks is not None and self._steps % SHARED_EVERY == 0:
            self._waiting = self._ranks.broadcast_object(self._waiting, src=0)
            self._flush()

    def _flush(self) -> None:
        observe = {
            "verify": self._learns.observe_verify,
            "plain": self._learns.observe_plain,
            "draft": self._learns.observe_draft,
        }
        for time in self._waiting:
            observe[time.part](time.size, time.context_tokens, time.seconds)
        self._waiting = []
