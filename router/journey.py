"""One client's request on its way: what it has, and what has happened to it."""

from typing import Any

from deepinfer_router.exchange import Exchange
from deepinfer_router.http_headers import Headers, uncoded
from deepinfer_router.lease import Lease
from deepinfer_router.request import Request
from deepinfer_router.roles import Role
from deepinfer_router.tracing import Trace
from deepinfer_router.transcript import Transcript
from deepinfer_router.usage import MARK


class Journey:
    """Of one request. Whoever relays its answer gives `seen` to the relay."""

    __slots__ = (
        "answering",
        "cached_tokens",
        "changes",
        "deadline",
        "engine",
        "events",
        "exchange",
        "first_token_at",
        "headers",
        "outcome",
        "request",
        "rerouted",
        "resumes",
        "sent_at",
        "splits",
        "trace",
        "transcript",
        "usage_in",
        "_clock",
    )

    def __init__(self, exchange: Exchange, request: Request, deadline: float, clock: Any) -> None:
        """`deadline`: when its answer must have begun, on the `clock`'s seconds."""
        self.exchange = exchange
        self.request = request
        self.deadline = deadline
        self.headers: Headers = request.headers_for_engine()
        self.splits = False
        """Two engines may share it."""
        self.changes: dict[str, Any] = {}
        """Of its body, on top of the request's own: what a resumed or an encoded one has."""
        self.transcript: Transcript | None = None
        self.rerouted: set[Role] = set()
        """For what a second engine has been asked, where a first one had it."""
        self.resumes = 0
        self.answering: Lease | None = None
        """Of the engine whose answer is coming."""
        self.cached_tokens: int | None = None
        """Of the prompt, where another engine than the one that answers has said it."""
        self.sent_at = 0.0
        """When it was sent to the engine that answers."""
        self.first_token_at = 0.0
        self.events = 0
        self.usage_in = b""
        """The last piece of the answer that has a usage."""
        self.engine = ""
        """Id of the engine that it was sent to last."""
        self.trace: Trace | None = None
        self.outcome = ""
        """How it ended: a fixed word, a label of metrics."""
        self._clock = clock

    @property
    def params(self) -> dict[str, Any]:
        """`kv_transfer_params` that the router gives it at any engine."""
        ours, now = self.request.changes.get("kv_transfer_params"), self.changes.get("kv_transfer_params")
        return {**(ours if isinstance(ours, dict) else {}), **(now or {})}

    def read_here(self) -> None:
        """Answers of engines are read on the way: they are to come without a coding, whatever the client takes."""
        self.headers = uncoded(self.headers)

    def body(self, changes: dict[str, Any] | None = None) -> bytes:
        """Its body for an engine."""
        if not changes:
            return self.request.body(self.changes) if self.changes or self.request.changes else self.request.raw
        return self.request.body({**self.changes, **changes} if self.changes else changes)

    def seen_whole(self, data: bytes) -> None:
        """An answer without a stream went to the client."""
        self.first_token_at = self._clock()
        if MARK in data:
            self.usage_in = data

    def seen(self, data: bytes) -> None:
        """A piece of the answer went to the client: of a stream, whole events."""
        lease = self.answering
        if not self.first_token_at:
            self.first_token_at = now = self._clock()
            if lease is not None:
                lease.first_token(now)
        if MARK in data:
            self.usage_in = data
        if self.request.stream:
            events = data.count(b"\n\n")
            self.events += events
            if lease is not None:
                lease.tokens(events)
