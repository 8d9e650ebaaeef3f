"""Where requests come in: reads what the router has to know of one, and refuses what no engine would take."""

import os
from itertools import count
from typing import Any

import orjson

from deepinfer_kvstore.extra_keys import Lora
from deepinfer_router.api import MODELS, OTHER, Api, Kind, api_of
from deepinfer_router.entry_config import EntryConfig
from deepinfer_router.errors import Refusal, RouterConfigError
from deepinfer_router.grammar import Grammars
from deepinfer_router.grammar_form import FORM_FIELDS
from deepinfer_router.identity import Identities, Identity
from deepinfer_router.identity_config import IdentityConfig
from deepinfer_router.request import Header, Incoming, Request
from deepinfer_router.store_config import StoreConfig
from deepinfer_router.token_estimate import TokenEstimate
from deepinfer_router.wishes import Wishes
from deepinfer_router.work import Work

EXPECTED_OUTPUT = 256
"""Tokens of an answer, until more is known."""
MAX_ID_BYTES = 128
MAX_SESSION_CHARS = 256
"""A longer name of a conversation is none: it would be remembered."""
Headers = dict[bytes, bytes]
_ID_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")
_IMAGES = ("image_url", "input_image", "image")
MAX_DEADLINE_MS = 86_400_000.0


class Entry:
    """Reads requests. On the event loop."""

    def __init__(
        self,
        config: EntryConfig | None = None,
        identity: IdentityConfig | None = None,
        store: StoreConfig | None = None,
        *,
        workers: int = 1,
    ) -> None:
        """`workers`: processes that share the limits of keys.

        Raises:
            RouterConfigError: a key or a file of the configuration cannot be read.
        """
        self.config = config or EntryConfig()
        self.estimate = TokenEstimate(self.config.tokens_per_byte)
        identity = identity or IdentityConfig()
        self._workers = workers
        self._has_store = store is not None
        self.identities = Identities(identity, workers)
        self._deadline_header = self.config.deadline_header.lower().encode()
        self._image_tokens = self.config.image_tokens
        self._adapters = self.config.adapters
        self._id_prefix = os.urandom(8).hex().encode() + b"-"
        self._ids = count()
        self._engine_key = _engine_key(identity)
        self._store = None
        if store is not None:  # likewise the client of the store
            from deepinfer_router.store_check import StoreCheck

            self._store = StoreCheck(store)
        self._grammars = Grammars(self.config.grammar) if self.config.grammar.check else None
        self._encoding = None
        if self.config.encoding == "recipe":  # only then, for recipe takes memory
            from deepinfer_router.encoding import Encoding

            self._encoding = Encoding(self.config.recipe)
        self._wishes = Wishes(identity, self._has_store)

    def reload(self, identity: IdentityConfig) -> None:
        """Requests from now on are of these keys.

        Raises:
            RouterConfigError: a key cannot be read; those of before go on.
        """
        engine_key, identities = _engine_key(identity), Identities(identity, self._workers)
        identities.take_over(self.identities)
        self.identities, self._engine_key = identities, engine_key
        self._wishes = Wishes(identity, self._has_store)

    def read(self, exchange: Incoming) -> Request:
        """The request of an exchange. The caller calls its `release` when it is over.

        Raises:
            Refusal: 400 what is no JSON object, or a field that is read has another type; 401, 403, 429 its key;
                404 a path that is not to pass; 415 an encoded body.
        """
        headers = dict(exchange.headers)
        identity = self.identities.everybody or self._identity(headers)
        route = exchange.route
        api = api_of(exchange.method, route)
        if api is OTHER and self.config.unknown_routes == "refuse":
            raise Refusal(404, "unknown_route", "this path is none of an API that is served here")
        raw = exchange.body
        fields: dict[str, Any] = {}
        if api.json:
            if headers.get(b"content-encoding", b"identity") != b"identity":
                raise Refusal(415, "encoded_body", "the body has a content-encoding: send it without")
            fields = _parse(raw)
        model = fields.get("model") or ""
        if type(model) is not str:
            raise _wrong_type("model", "a string", model)
        stream = fields.get("stream")
        if stream is not None and type(stream) is not bool:
            raise _wrong_type("stream", "true or false", stream)
        work = Work(model=model, tenant=identity.tenant, priority=identity.priority, expected_output=EXPECTED_OUTPUT)
        prompt_bytes = len(raw)
        token_ids = None
        if api.prompt:
            token_ids = _read_generation(api, fields, work)
        if token_ids is not None:
            work.prompt_tokens = len(token_ids)
            prompt_bytes = 0
        elif api.json:
            work.images, image_bytes = images(fields)
            prompt_bytes -= image_bytes
            work.prompt_tokens = self.estimate.tokens(model, prompt_bytes) + work.images * self._image_tokens
        if self._adapters and (adapter := self._adapters.get(model)):
            work.lora, work.model = model, adapter.model
        self._read_headers(headers, exchange.received_at, fields, work)
        request = Request(
            api,
            work,
            identity,
            raw,
            fields,
            exchange.headers,
            self._request_id(headers[b"x-request-id"]) if b"x-request-id" in headers else self._new_id(),
            self.estimate,
            prompt_bytes,
        )
        request.token_ids = token_ids
        request.engine_key = self._engine_key
        self._wishes.apply(request, route, headers)
        identity.enter(None if api is MODELS else model, work.prompt_tokens)
        return request

    def gate(self, headers: list[Header]) -> None:
        """Raises Refusal: 401, whoever sends these headers need not send a body."""
        if self.identities.everybody is None:
            self._identity(dict(headers))

    async def prepare(self, request: Request) -> None:
        """What takes longer than `read` may: its grammar, tokens of a conversation, and what the store has of them.

        Raises:
            Refusal: 400, for what can only be seen now.
        """
        if not request.api.generates:
            return
        if self._grammars is not None and not FORM_FIELDS.isdisjoint(request.fields):
            await self._grammars.check(request)
        if self._encoding is not None and request.token_ids is None:
            await self._encoding.encode(request)
        if self._store is not None:
            await self._store.check(request, self._lora(request))

    async def close(self) -> None:
        """Idempotent."""
        if self._grammars is not None:
            await self._grammars.close()
        if self._encoding is not None:
            self._encoding.close()
        if self._store is not None:
            await self._store.close()

    def _identity(self, headers: Headers) -> Identity:
        return self.identities.find(headers.get(b"authorization"), headers.get(b"x-api-key"))

    def _lora(self, request: Request) -> Lora | None:
        adapter = self.config.adapters.get(request.work.lora)
        return None if adapter is None else Lora(request.work.lora, adapter.path)

    def _read_headers(self, headers: Headers, received_at: float, fields: dict[str, Any], work: Work) -> None:
        if (session := headers.get(b"x-session-id")) is not None:
            named: Any = session.decode("latin-1")
        else:
            named = fields.get("session_id") or fields.get("prompt_cache_key")
        if type(named) is str and len(named) <= MAX_SESSION_CHARS:
            work.session = named
        if (text := headers.get(self._deadline_header)) is not None:
            work.deadline = received_at + _milliseconds(text, self._deadline_header) / 1e3

    def _new_id(self) -> bytes:
        return self._id_prefix + b"%x" % next(self._ids)

    def _request_id(self, given: bytes) -> bytes:
        """The client's, if an engine can have it: three underscores have a meaning in vLLM's P2P connectors."""
        if (
            given
            and len(given) <= MAX_ID_BYTES
            and b"___" not in given
            and _ID_BYTES.issuperset(given.replace(b"_", b""))
        ):
            return given
        return self._new_id()


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "invalid_json", f"the body is no JSON: {error}") from error
    if type(fields) is not dict:
        raise Refusal(400, "invalid_json", "the body is JSON, but no object: send an object with the API's fields")
    return fields


def _read_generation(api: Api, fields: dict[str, Any], work: Work) -> list[int] | None:
    """Fill in what bounds the answer; the prompt's token ids, where the body has them."""
    sampling = fields
    if api.in_sampling_params:
        sampling = fields.get("sampling_params") or {}
        if type(sampling) is not dict:
            raise _wrong_type("sampling_params", "an object", sampling)
    for name in api.max_tokens:
        value = sampling.get(name)
        if value is not None:
            if type(value) is not int:
                raise _wrong_type(name, "a whole number", value)
            work.max_tokens = value
            if 0 < value < EXPECTED_OUTPUT:
                work.expected_output = value
            break
    n = sampling.get("n")
    if n is not None and type(n) is not int:
        raise _wrong_type("n", "a whole number", n)
    prompt = fields.get(api.prompt)
    if api.kind is Kind.COMPLETION or api.kind is Kind.GENERATE:
        if type(prompt) is list and prompt and type(prompt[0]) is int:
            return prompt
    elif (
        prompt is not None and type(prompt) is not list and (api.kind is not Kind.RESPONSES or type(prompt) is not str)
    ):
        raise _wrong_type(api.prompt, "a list", prompt)
    return None


def images(fields: dict[str, Any]) -> tuple[int, int]:
    """How many images a conversation has, and the bytes of those that are in it."""
    number = size = 0
    for name in ("messages", "input", "system"):
        left = fields.get(name)
        while left and type(left) is list:
            inside: list[Any] = []
            for part in left:
                if type(part) is not dict:
                    continue
                if "type" in part and part["type"] in _IMAGES:
                    number += 1
                    size += _image_bytes(part)
                    continue
                if type(more := part.get("content")) is list:  # of a message or a tool's result
                    inside += more
                if "output" in part and type(more := part["output"]) is list:  # of a Responses tool
                    inside += more
            left = inside
    return number, size


def _image_bytes(part: dict[str, Any]) -> int:
    where = part.get("image_url") or part.get("source")
    if type(where) is dict:
        where = where.get("url") or where.get("data")
    return len(where) if type(where) is str else 0


_CALLED = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def _wrong_type(name: str, wanted: str, value: object) -> Refusal:
    is_ = _CALLED.get(type(value), "a number")
    return Refusal(400, "invalid_type", f"{name} must be {wanted}, and is {is_}", param=name)


def _milliseconds(text: bytes, header: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= MAX_DEADLINE_MS:
        raise Refusal(400, "invalid_header", f"{header.decode()} must be milliseconds of 1 to {MAX_DEADLINE_MS:.0f}")
    return value


def _engine_key(identity: IdentityConfig) -> bytes | None:
    name = identity.engine_api_key_env
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise RouterConfigError(f"identity.engine_api_key_env: environment variable {name} is empty: put the key there")
    return b"Bearer " + key.encode()
