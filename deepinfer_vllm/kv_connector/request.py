"""What one request asks of the store, and what is known of its blocks there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

PARAMS = "kvstore"
MAX_TENANT_CHARS = 128
MAX_TICKET_CHARS = 4096


class Refused(set[OffloadKey]):
    """Keys that a request has tried to load in vain: misses for it from then on, so that it is computed instead."""


def refused(request: ReqContext) -> Refused:
    """The request's refused keys."""
    keys: Refused | None = request.get_state(Refused)
    if keys is None:
        request.set_state(keys := Refused())
    return keys


@dataclass(frozen=True)
class Wishes:
    """`kv_transfer_params.kvstore` of a request. The router sets it, yet a client may have."""

    ttl_class: str | None = None
    """One of the retention's classes; None: the default."""
    tenant: str = ""
    ticket: str | None = None
    """The answer of a CHECK, as it came."""
    ignored: int = 0
    """Values that were no such thing."""

    @classmethod
    def read(cls, params: Any, classes: Mapping[str, Any]) -> "Wishes":
        """Never fails: what cannot be used is counted and left out."""
        asked = params.get(PARAMS) if isinstance(params, dict) else None
        if asked is None:
            return cls()
        if not isinstance(asked, dict):
            return cls(ignored=1)
        ttl_class, tenant, ticket = (asked.get(name) for name in ("ttl_class", "tenant", "ticket"))
        good_class = isinstance(ttl_class, str) and ttl_class in classes
        good_tenant = isinstance(tenant, str) and len(tenant) <= MAX_TENANT_CHARS
        good_ticket = isinstance(ticket, str) and len(ticket) <= MAX_TICKET_CHARS
        return cls(
            ttl_class=str(ttl_class) if good_class else None,
            tenant=str(tenant) if good_tenant else "",
            ticket=str(ticket) if good_ticket else None,
            ignored=sum(
                value is not None and not good
                for value, good in ((ttl_class, good_class), (tenant, good_tenant), (ticket, good_ticket))
            )
            + len(asked.keys() - {"ttl_class", "tenant", "ticket", "stored_tokens"}),
        )


@dataclass
class Prefix:
    """A request's keys in the order of the prompt, by vLLM's group, and which of them the store has."""

    keys: dict[int, list[OffloadKey]] = field(default_factory=dict)
    places: dict[OffloadKey, int] = field(default_factory=dict)
    """Number of each key in its group's list."""
    found: dict[OffloadKey, bool] = field(default_factory=dict)
    absent_tokens: int = 0
    """Of the blocks that were not found; of one group, for groups overlap in the tokens that they cover."""

    @classmethod
    def of(cls, request: ReqContext) -> "Prefix":
        """The request's, with the keys it has by now."""
        prefix: Prefix | None = request.get_state(cls)
        if prefix is None:
            request.set_state(prefix := cls())
        positions = request._offload_key_positions
        if len(positions) != len(prefix.places):
            prefix._extend(positions)
        return prefix

    def forget(self) -> None:
        """Have the store asked again."""
        self.found.clear()
        self.absent_tokens = 0

    def parent(self, key: OffloadKey) -> OffloadKey | None:
        """The key before this one; None for the first, and for one that is not the request's."""
        place = self.places.get(key, 0)
        return self.keys[get_offload_group_idx(key)][place - 1] if place else None

    def _extend(self, positions: dict[OffloadKey, int]) -> None:
        for key in positions:
            if key not in self.places:
                keys = self.keys.setdefault(get_offload_group_idx(key), [])
                self.places[key] = len(keys)
                keys.append(key)
