"""Mooncake: prefill and decode engine are asked at once, and find each other by a transfer id.

Contract of MooncakeConnector in vLLM 0.32. A prefill that ends with anything but its length gives its blocks away, and
the decode would wait in vain; so its one token may be any.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from deepinfer_router.api import Api, Kind
from deepinfer_router.handover import Params, one_answer, one_prompt
from deepinfer_router.prefill_body import prefill_changes
from deepinfer_router.target import Engine, Target

NEVER_STOPPING = frozenset((Kind.CHAT, Kind.COMPLETION, Kind.RESPONSES, Kind.GENERATE))
"""APIs with `ignore_eos`."""


def bootstrap_url(engine: Engine, port: int) -> str:
    """Where a prefill engine's Mooncake bootstrap server is."""
    host = urlsplit(engine.url).hostname or ""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Mooncake:
    """Needs each prefill engine's id, which its bootstrap server tells."""

    concurrent = True
    reusable = False

    def __init__(self, bootstrap_port: int) -> None:
        self._port = bootstrap_port
        self.engine_ids: dict[tuple[str, int], str] = {}
        """By bootstrap URL and rank: the engine ids of their current lives."""

    def splits(self, api: Api, fields: Mapping[str, Any]) -> bool:
        """Not where a prefill could stop by itself."""
        return api.kind in NEVER_STOPPING and one_prompt(api, fields) and one_answer(api, fields)

    def prefill(self, api: Api, fields: Mapping[str, Any], params: Params, transfer: str) -> dict[str, Any]:
        """One token of any kind, under the transfer's id."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return {**prefill_changes(api, fields, never_stop=True), "kv_transfer_params": {**params, **asked}}

    def decode(self, params: Params, answer: Params, transfer: str, prefill: Target) -> Params:
        """Whom to fetch from. `answer` is empty: the prefill has not answered yet."""
        url = bootstrap_url(prefill.engine, self._port)
        return {
            **params,
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_bootstrap_addr": url,
            "remote_engine_id": self.engine_ids[url, prefill.rank],
        }

    def pinned(self, answer: Params) -> bool:
        """The decode engine was asked at the same time, and says so itself when its request ends."""
        return False
