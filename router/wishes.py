"""What is decided for a request by key, route or header: its priority, tenant, TTL class and cache salt.

The client decides what its key allows. What it says otherwise, in headers or in the body, does not reach an engine.
"""

import re
from typing import Any, cast, get_args

from deepinfer_router.body_patch import DROP
from deepinfer_router.errors import Refusal
from deepinfer_router.identity_config import CACHE_SALT, IdentityConfig, TtlClass
from deepinfer_router.request import Request

MAX_TENANT_CHARS = 128
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""What tells engines whose memory to read, and the store whose it is."""
_TTL_CLASSES = frozenset(get_args(TtlClass))
Headers = dict[bytes, bytes]


class Wishes:
    """Applies section `identity` to requests."""

    def __init__(self, config: IdentityConfig, has_store: bool) -> None:
        grants = (config.everybody, *config.keys)
        self._has_store = has_store
        self._own_transfers = has_store or bool(config.keys)
        self._salts = has_store or any(one.cache_salt or "cache_salt" in one.may_set for one in grants)
        self._routes = [(one.prefix.encode(), one.ttl_class) for one in config.routes]

    def apply(self, request: Request, route: bytes, headers: Headers) -> None:
        """Fill in the request's work, and what changes of its body.

        Raises:
            Refusal: 400, a header that may decide cannot be read.
        """
        identity, work, fields, changes = request.identity, request.work, request.fields, request.changes
        may_set = identity.may_set
        if "priority" in may_set:
            if "priority" in fields or b"x-priority" in headers or b"x-vllm-priority" in headers:
                work.priority = _priority(headers, fields, work.priority)
        elif "priority" in fields:
            changes["priority"] = DROP
        if "tenant" in may_set:
            work.tenant = _text(headers, b"x-tenant", MAX_TENANT_CHARS) or work.tenant
        if self._own_transfers:
            _drop_transfers(fields, changes)
        if not self._salts:
            return
        salt, ttl_class = identity.cache_salt, identity.ttl_class
        if may_set:
            if "cache_salt" in may_set:
                given = _text(headers, b"x-cache-salt", MAX_TENANT_CHARS)
                if given and not re.fullmatch(CACHE_SALT, given):
                    raise _bad_header(b"x-cache-salt", "at most 128 characters, none of @ / \\")
                salt = given or salt
            if "ttl_class" in may_set and (given := _text(headers, b"x-ttl-class", 16)):
                if given not in _TTL_CLASSES:
                    raise _bad_header(b"x-ttl-class", "agent, chat or none")
                ttl_class = cast(TtlClass, given)
        if ttl_class is None:
            ttl_class = next((found for prefix, found in self._routes if route.startswith(prefix)), None)
        request.cache_salt = salt
        request.ttl_class = ttl_class
        if request.api.salted and (salt is not None or "cache_salt" in fields):
            changes["cache_salt"] = DROP if salt is None else salt
        if self._has_store and request.api.generates:
            told: dict[str, str] = {} if ttl_class is None else {"ttl_class": ttl_class}
            if work.tenant:
                told["tenant"] = work.tenant
            changes["kv_transfer_params"] = {"kvstore": told}


def _drop_transfers(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """Raises Refusal: they are where vLLM lets any argument through."""
    for name in _TRANSFERS:
        if name in fields:
            changes[name] = DROP
    sampling = fields.get("sampling_params")
    through = {
        "vllm_xargs": fields.get("vllm_xargs"),
        "sampling_params.extra_args": sampling.get("extra_args") if isinstance(sampling, dict) else None,
    }
    for param, said in through.items():
        if isinstance(said, dict) and not said.keys().isdisjoint(_TRANSFERS):
            what = " and ".join(_TRANSFERS)
            raise Refusal(
                400, "not_allowed", f"{what} are not taken from clients: leave them out of {param}", param=param
            )


def _priority(headers: Headers, fields: dict[str, Any], otherwise: int) -> int:
    for name in (b"x-priority", b"x-vllm-priority"):  # the second is vLLM's
        if (text := headers.get(name)) is not None:
            try:
                return int(text)
            except ValueError as error:
                raise _bad_header(name, "a whole number") from error
    value = fields.get("priority")
    if value is None:
        return otherwise
    if type(value) is not int:
        raise Refusal(
            400, "invalid_type", f"priority must be a whole number, and is {str(value)[:40]!r}", param="priority"
        )
    return value


def _text(headers: Headers, name: bytes, most: int) -> str | None:
    value = headers.get(name)
    if value is None:
        return None
    text = value.decode("latin-1")
    if len(text) > most:
        raise _bad_header(name, f"at most {most} characters")
    return text


def _bad_header(name: bytes, wanted: str) -> Refusal:
    return Refusal(400, "invalid_header", f"header {name.decode()} must be {wanted}")
