"""A prompt computed by one engine and continued by another, through the store.

The prefill engine answers once its blocks can be read by others, and says how many tokens they cover; whoever directs
requests gives that to the decode engine, which waits a little for them to arrive, and else computes the prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from deepinfer_vllm.kv_connector.request import PARAMS

STORED_TOKENS = "stored_tokens"
"""In `kv_transfer_params.kvstore`, of a prefill engine's answer and of the request to a decode engine."""
REMOTE_DECODE = "do_remote_decode"
"""vLLM's name, beside `kvstore`, for a request that another engine will continue."""
LOOK_SECONDS = 0.005
"""Between two looks for blocks that have not arrived."""


def stored_tokens(params: Any) -> int:
    """How many tokens of a prompt another engine says that it has stored; 0 where nothing sensible is said."""
    asked = params.get(PARAMS) if isinstance(params, dict) else None
    tokens = asked.get(STORED_TOKENS) if isinstance(asked, dict) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else 0


@dataclass
class _Held:
    until: float
    answers: list[tuple[int, EngineCoreOutput]] = field(default_factory=list)
    """(client, last output)."""


class AnswerGate:
    """Keeps the last output of requests until their blocks are stored, or for a while. On the scheduler's thread."""

    def __init__(
        self,
        is_stored: Callable[[str], bool],
        give_up: Callable[[str], object],
        patience_seconds: float,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`is_stored` is asked about a request id each step, `give_up` told where it took too long."""
        self._is_stored = is_stored
        self._give_up = give_up
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self.late = 0
        """Answers given though not everything was stored in time."""

    def hold(self, request_id: str) -> None:
        """Keep the answer of a request that is ending in this step."""
        self._held[request_id] = _Held(self._clock() + self._patience_seconds)

    def pending(self) -> bool:
        """Whether answers are kept: the engine must then step on."""
        return bool(self._held)

    def pass_through(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Take out of a step's outputs, by client, what is to be kept, and add what need not be any longer."""
        if not self._held:
            return
        for client, step in outputs.items():
            kept = [out for out in step.outputs if out.finish_reason is not None and out.request_id in self._held]
            for out in kept:
                self._held[out.request_id].answers.append((client, out))
            if kept:
                step.outputs = [out for out in step.outputs if not any(out is one for one in kept)]
        for request_id, held in list(self._held.items()):
            stored = self._is_stored(request_id)
            if not stored and self._clock() < held.until:
                continue
            if not stored:
                self.late += 1
                self._give_up(request_id)
            del self._held[request_id]
            for client, out in held.answers:
                step = outputs.setdefault(client, EngineCoreOutputs())
                step.outputs = [*step.outputs, out]


class ArrivalWait:
    """How long requests may wait for blocks that another engine has stored. On the scheduler's thread."""

    def __init__(self, patience_seconds: float, *, clock: Callable[[], float] = monotonic) -> None:
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._waiting: dict[str, tuple[float, float]] = {}
        self.missed = 0
        """Requests for which it was too long."""

    def too_early(self, request_id: str) -> bool:
        """Whether the last look for blocks of a waiting request was only just now."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and self._clock() < waiting[1]

    def waits(self, request_id: str, found_tokens: int, expected_tokens: int) -> bool:
        """Whether a request that has found so many tokens is to look again later."""
        if found_tokens >= expected_tokens:
            self._waiting.pop(request_id, None)
            return False
        now = self._clock()
        until, _ = self._waiting.get(request_id, (now + self._patience_seconds, now))
        if now >= until:
            self.missed += until > 0
            self._waiting[request_id] = 0.0, 0.0  # does not wait a second time, should it be preempted
            return False
        self._waiting[request_id] = until, now + LOOK_SECONDS
        return True

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._waiting.pop(request_id, None)
