"""vLLM's tiering manager, taught that copies fail and that loads may hang."""

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager


class Refused(set[OffloadKey]):
    """Keys that a request has tried to load in vain: misses for it from then on, so that it is computed instead."""


def refused(request: ReqContext) -> Refused:
    """The request's refused keys."""
    keys: Refused | None = request.get_state(Refused)
    if keys is None:
        request.set_state(keys := Refused())
    return keys


class StoreOffloadingManager(TieringOffloadingManager):
    """All methods run on the scheduler's thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failed_stores: set[OffloadKey] = set()

    def fail_store(self, keys: Iterable[OffloadKey]) -> None:
        """Let the coming `complete_store` of these keys, whose rows were not written whole, drop them."""
        self._failed_stores.update(keys)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """vLLM's, which takes every copy for a good one."""
        failed = not self._failed_stores.isdisjoint(keys)
        self._failed_stores.difference_update(keys)
        super().complete_store(keys, req_context, success and not failed)

    def lookup(self, key: OffloadKey, req_context: ReqContext, **kwargs: Any) -> LookupResult:
        """vLLM's, but for what the request has failed to load."""
        if (keys := req_context.get_state(Refused)) is not None and key in keys:
            return LookupResult.MISS
        return super().lookup(key, req_context, **kwargs)
