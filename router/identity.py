"""Who asks: API keys, and what each may do."""

from collections.abc import Callable
from hashlib import sha256
from math import ceil
from time import monotonic

from deepinfer_router.errors import Refusal, RouterConfigError
from deepinfer_router.identity_config import Grant, IdentityConfig
from deepinfer_router.token_bucket import TokenBucket


class Identity:
    """One API key, or everybody where there are none: what it may, and how much of it is left. On the event loop."""

    __slots__ = (
        "active",
        "cache_salt",
        "may_set",
        "max_concurrent",
        "models",
        "name",
        "priority",
        "requests",
        "tenant",
        "tokens",
        "ttl_class",
        "_bounded",
        "_who",
    )

    def __init__(self, name: str, grant: Grant, workers: int, clock: Callable[[], float] = monotonic) -> None:
        """`workers`: processes that requests come to alike; each grants its share of the limits."""
        self.name = name
        self.tenant = grant.tenant
        self.ttl_class = grant.ttl_class
        self.priority = grant.priority
        self.cache_salt = grant.cache_salt
        self.models = frozenset(grant.models)
        self.may_set = frozenset(grant.may_set)
        self.requests = _bucket(grant.requests_per_minute, workers, clock)
        self.tokens = _bucket(grant.tokens_per_minute, workers, clock)
        self.max_concurrent = grant.max_concurrent and ceil(grant.max_concurrent / workers)
        self.active = 0
        """Requests now."""
        self._who = f"API key {name!r}" if name else "everybody together"
        self._bounded = bool(self.requests or self.tokens or self.max_concurrent)

    def enter(self, model: str | None, prompt_tokens: int) -> None:
        """Count a request, to be given back by `leave`. `model` None: it is about no model.

        Raises:
            Refusal: another model, or a limit is reached; nothing is counted then.
        """
        if self.models and model is not None and model not in self.models:
            raise Refusal(
                403,
                "model_not_allowed",
                f"{self._who} may not use model {model!r}: ask for one of {', '.join(sorted(self.models))}",
                param="model",
            )
        if self._bounded:
            self._check_limits(prompt_tokens)
        self.active += 1

    def leave(self) -> None:
        """The request has ended."""
        self.active -= 1

    def spend(self, tokens: int) -> None:
        """Tokens beyond those that `enter` was told of; less than none gives some back."""
        if self.tokens:
            self.tokens.spend(tokens)

    def _check_limits(self, prompt_tokens: int) -> None:
        if self.max_concurrent is not None and self.active >= self.max_concurrent:
            raise self._refuse("concurrency_limit", f"{self.active} requests at once, its limit", 1.0)
        if self.tokens and (wait := self.tokens.wait_s(0)):
            raise self._refuse("token_limit", "its tokens of this minute are used up", wait)
        if self.requests:
            if wait := self.requests.wait_s(1):
                raise self._refuse("request_limit", "its requests of this minute are used up", wait)
            self.requests.spend(1)
        if self.tokens:
            self.tokens.spend(prompt_tokens)

    def _refuse(self, code: str, what: str, retry_after_s: float) -> Refusal:
        message = f"{self._who} has {what}: try again in {max(1, ceil(retry_after_s))} s"
        return Refusal(429, code, message, retry_after_s=retry_after_s)


_EVERYBODY = b""
"""In the place of a digest."""


class Identities:
    """All of them."""

    def __init__(self, config: IdentityConfig, workers: int = 1) -> None:
        """Raises RouterConfigError: a key cannot be read, or is there twice."""
        self._grants: dict[bytes, Grant] = {}
        self._by_digest: dict[bytes, Identity] = {}
        self.everybody: Identity | None = None
        if not config.keys:
            self._grants[_EVERYBODY] = config.everybody
            self.everybody = self._by_digest[_EVERYBODY] = Identity("", config.everybody, workers)
        names: dict[bytes, str] = {}
        for key in config.keys:
            digest = key.digest()
            if digest in names:
                raise RouterConfigError(f"API keys {names[digest]!r} and {key.name!r} are one key: remove one")
            names[digest] = key.name
            self._grants[digest] = key
            self._by_digest[digest] = Identity(key.name, key, workers)

    def take_over(self, before: "Identities") -> None:
        """These replace others: a key whose grants stay goes on with what is left of its limits."""
        for digest, identity in before._by_digest.items():
            if digest in self._grants and self._grants[digest] == before._grants[digest]:
                self._by_digest[digest] = identity
        self.everybody = self._by_digest.get(_EVERYBODY)

    def find(self, authorization: bytes | None, x_api_key: bytes | None) -> Identity:
        """Whose the headers `authorization` (Bearer) or `x-api-key` are.

        They are looked for by their digest: what that takes tells nothing of a key.

        Raises:
            Refusal: nobody's.
        """
        if self.everybody is not None:
            return self.everybody
        key = x_api_key
        if authorization is not None and authorization[:7].lower() == b"bearer ":
            key = authorization[7:].strip()
        if not key:
            raise Refusal(
                401, "missing_api_key", "no API key: send it as `Authorization: Bearer KEY` or as `x-api-key`"
            )
        identity = self._by_digest.get(sha256(key).digest())
        if identity is None:
            raise Refusal(401, "invalid_api_key", "this API key is not known: check it, or ask who runs this service")
        return identity


def _bucket(per_minute: float | None, workers: int, clock: Callable[[], float]) -> TokenBucket | None:
    return TokenBucket(per_minute / workers, 60.0, clock) if per_minute is not None else None
