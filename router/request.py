"""A client's request on its way through the router."""

from typing import TYPE_CHECKING, Any, Protocol

from deepinfer_router.api import Api
from deepinfer_router.body_patch import DROP, patch
from deepinfer_router.http_headers import HOP_BY_HOP
from deepinfer_router.identity import Identity
from deepinfer_router.resumable import why_not_resumable
from deepinfer_router.work import Work

if TYPE_CHECKING:
    from deepinfer_router.token_estimate import TokenEstimate

Header = tuple[bytes, bytes]

NOT_FORWARDED = HOP_BY_HOP | frozenset(
    (
        # made anew for each hop
        b"host",
        b"content-length",
        b"expect",
        b"x-request-id",
        # the router's own secrets and decisions
        b"authorization",
        b"x-api-key",
        b"x-data-parallel-rank",
        b"x-tenant",
        b"x-ttl-class",
        b"x-cache-salt",
        b"x-priority",
    )
)
"""Headers that engines do not get from the client."""


class Incoming(Protocol):
    """What is read of an exchange: see `exchange.Exchange`. Header names are lower case."""

    @property
    def method(self) -> bytes: ...
    @property
    def route(self) -> bytes: ...
    @property
    def headers(self) -> list[Header]: ...
    @property
    def body(self) -> bytes: ...
    @property
    def received_at(self) -> float: ...


class Request:
    """One request. Made by `Entry.read`; whoever handles it calls `release` when it is over, however that came."""

    __slots__ = (
        "api",
        "cache_salt",
        "changes",
        "engine_key",
        "fields",
        "headers",
        "identity",
        "prompt_bytes",
        "prompt_charged",
        "raw",
        "request_id",
        "stream",
        "ticket",
        "token_ids",
        "ttl_class",
        "work",
        "_estimate",
        "_released",
        "_why_not_resumable",
    )

    def __init__(
        self,
        api: Api,
        work: Work,
        identity: Identity,
        raw: bytes,
        fields: dict[str, Any],
        headers: list[Header],
        request_id: bytes,
        estimate: "TokenEstimate",
        prompt_bytes: int,
    ) -> None:
        self.api = api
        self.work = work
        self.identity = identity
        self.raw = raw
        """The body as it came."""
        self.fields = fields
        """What it says; empty where it is not read. Not to be changed."""
        self.headers = headers
        """The client's."""
        self.request_id = request_id
        self.stream: bool = bool(fields.get("stream"))
        self.token_ids: list[int] | None = None
        """The prompt's, where they are known. Images are one token each."""
        self.ticket: bytes = b""
        """What the store holds for it."""
        self.changes: dict[str, Any] = {}
        """Fields that engines get otherwise than the client wrote them, DROP: not at all."""
        self.cache_salt: str | None = None
        """What keeps its cached prefixes apart: set by the router."""
        self.ttl_class: str | None = None
        """How long the store keeps what is computed for it."""
        self.engine_key: bytes | None = None
        """The engines' API key."""
        self.prompt_bytes = prompt_bytes
        """What its prompt tokens are estimated from."""
        self.prompt_charged = work.prompt_tokens
        """Prompt tokens that its key has paid for."""
        self._estimate = estimate
        self._released = False
        self._why_not_resumable: str | None = None

    def body(self, changes: dict[str, Any] | None = None) -> bytes:
        """The body for an engine: the client's with the router's changes, and with `changes` on top.

        The very bytes that came, if nothing changes. A value DROP takes a field out; `kv_transfer_params` adds to what
        was said there. Fields that nobody names stay as the client wrote them.
        """
        if not changes:
            return patch(self.raw, self.fields, self.changes) if self.changes else self.raw
        merged = {**self.changes, **changes}
        if isinstance(more := changes.get("kv_transfer_params"), dict):
            said = self.changes.get("kv_transfer_params") or self.fields.get("kv_transfer_params")
            merged["kv_transfer_params"] = {**said, **more} if isinstance(said, dict) else more
        return patch(self.raw, self.fields, merged)

    def headers_for_engine(self) -> list[Header]:
        """The client's headers without those of its connection and its key, and `x-request-id`."""
        headers = [header for header in self.headers if header[0] not in NOT_FORWARDED]
        if "priority" not in self.identity.may_set:
            headers = [header for header in headers if header[0] != b"x-vllm-priority"]
        headers.append((b"x-request-id", self.request_id))
        if self.engine_key is not None:
            headers.append((b"authorization", self.engine_key))
        return headers

    @property
    def resumable(self) -> bool:
        """Whether another engine can go on with its answer from the tokens sent so far."""
        return not self.why_not_resumable

    @property
    def why_not_resumable(self) -> str:
        """A fixed word; empty: it is resumable."""
        if self._why_not_resumable is None:
            self._why_not_resumable = why_not_resumable(self.api, self.fields)
        return self._why_not_resumable

    def used(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """An engine has counted its tokens: for later estimates, and its key's limit. Once a request."""
        if not self.work.images:
            self._estimate.observe(self.work.model, self.prompt_bytes, prompt_tokens)
        if self.identity.tokens:
            self.identity.spend(prompt_tokens - self.prompt_charged + completion_tokens)
        self.prompt_charged = prompt_tokens

    def release(self) -> None:
        """It has ended. Idempotent."""
        if not self._released:
            self._released = True
            self.identity.leave()


__all__ = ["DROP", "Header", "Incoming", "Request"]
