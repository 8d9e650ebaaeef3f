"""One request to one engine, and how that can fail."""

from dataclasses import dataclass

from deepinfer_router.errors import Refusal
from deepinfer_router.http_client import UpstreamError, UpstreamResponse
from deepinfer_router.http_headers import Headers
from deepinfer_router.lease import Lease
from deepinfer_router.target import Engine, Target
from deepinfer_router.upstreams import Upstreams
from deepinfer_router.verdict import Verdict, verdict

MAX_ERROR_BYTES = 1 << 20
"""Of an engine's answer that is an error."""
_RANK = b"x-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of an engine."""

    status: int
    headers: Headers
    body: bytes


class HopFailed(Exception):
    """An engine did not serve a request, which another may do."""

    def __init__(
        self, engine: Engine, kind: str, message: str, *, sent: bool = True, answer: Answer | None = None
    ) -> None:
        """`kind`, a label: connect, reset, timeout, protocol, stalled, lost, pressure, status or rejected."""
        super().__init__(message)
        self.engine = engine
        self.kind = kind
        self.message = message
        self.sent = sent
        """The engine may have worked on it."""
        self.answer = answer
        """What it said, where it said something."""

    @property
    def loads(self) -> bool:
        """Whether to ask another engine adds to a load that may be the cause."""
        return self.answer is not None or self.kind in ("timeout", "stalled")

    def refusal(self) -> Refusal:
        """What a client is told that nobody can serve; not for failures with an answer, which it gets itself."""
        if self.kind in ("timeout", "stalled"):
            return Refusal(504, "upstream_timeout", f"no engine answered in time: {self.message}")
        return Refusal(502, "upstream_lost", f"no engine answered: {self.message}", retry_after_s=1)


def for_rank(target: Target, headers: Headers) -> Headers:
    """`headers`, and the rank where the engine has several."""
    return [*headers, (_RANK, b"%d" % target.rank)] if len(target.engine.targets) > 1 else headers


async def ask(
    upstreams: Upstreams,
    lease: Lease,
    method: bytes,
    path: bytes,
    headers: Headers,
    body: bytes,
    first_byte_s: float | None,
) -> UpstreamResponse:
    """The head of the answer of the lease's target: a status below 500 other than 429.

    Raises:
        HopFailed: there is none. Cancelled, the engine sees its client leave at once.
    """
    target = lease.target
    engine = target.engine
    if len(engine.targets) > 1:
        headers = for_rank(target, headers)
    try:
        response = await upstreams.of(engine).send(method, path, headers, body, first_byte_s=first_byte_s)
    except UpstreamError as error:
        raise HopFailed(engine, error.kind, error.message, sent=error.sent) from error
    return response if response.status < 400 else await judged(engine, response, first_byte_s)


async def judged(engine: Engine, response: UpstreamResponse, stall_s: float | None) -> UpstreamResponse:
    """`response`, if it is such as `ask` gives. Raises HopFailed."""
    try:
        if response.status < 400:
            return response
        found = verdict(response.status)
        if found is Verdict.REJECTED:
            return response
        said = await response.read(MAX_ERROR_BYTES, stall_s=stall_s)
    except UpstreamError as error:
        raise HopFailed(engine, error.kind, error.message, sent=error.sent) from error
    kind = "pressure" if found is Verdict.PRESSURE else "status"
    answer = Answer(response.status, response.headers, said)
    raise HopFailed(engine, kind, f"engine {engine.id} answered {response.status}", answer=answer)
