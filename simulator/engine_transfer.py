"""Prefill and decode on different engines, as vLLM's NIXL and Mooncake connectors show it to a router.

NIXL: the prefill engine answers with `kv_transfer_params` that name its blocks and holds them for a lease; the decode
engine reads them, which frees them. Mooncake: both get a `transfer_id` and may be asked at once; the prefill engine
answers with no parameters, and sends only when it ended by length. In both, a decode engine that is left before it
began tells the other to let go; blocks that nobody fetched are freed when their time is up; and what cannot be fetched
is computed again.
The blocks' way, RDMA in vLLM, is an HTTP request from engine to engine here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_rank import Rank

NIXL_NEEDS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
MOONCAKE_NEEDS = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


class Lease:
    """Blocks of a computed prompt that a decode engine is to read."""

    __slots__ = ("expiry", "rank", "tokens")

    def __init__(self, rank: Rank, tokens: int) -> None:
        self.rank = rank
        self.tokens = tokens
        self.expiry: asyncio.TimerHandle | None = None


class Transfer:
    """One engine's side, whichever it is for a request."""

    def __init__(self, config: EngineConfig, engine_id: str, address: Callable[[], tuple[str, int]]) -> None:
        self.config = config
        self.engine_id = engine_id
        self.leases: dict[str, Lease] = {}
        self.expired = 0
        self.fetched_tokens = 0
        self.failed_fetches = 0
        self._address = address
        self._arrivals: dict[str, asyncio.Event] = {}

    def computed(
        self, kv: dict[str, Any], rank: Rank, request_id: str, prompt: int, finish: str
    ) -> dict[str, Any] | None:
        """The prefill engine is done: hold the blocks; what the answer tells, if anything."""
        if not kv.get("do_remote_decode") or self.config.connector == "none":
            return None
        if self.config.connector == "mooncake":
            if kv.get("transfer_id") and finish == "length":
                self._hold(kv["transfer_id"], rank, prompt)
            return None
        self._hold(request_id, rank, prompt)
        host, port = self._address()
        blocks = -(-prompt // self.config.block_tokens)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(blocks))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": prompt,
            "remote_blocks_expiry_time": asyncio.get_running_loop().time() + self.config.lease_s,
            "transfer_mode": "pull",
        }

    async def fetch(self, kv: dict[str, Any]) -> int:
        """The decode engine reads: tokens it need not compute, 0 where it must compute all."""
        if not kv.get("do_remote_prefill") or self.config.connector == "none":
            return 0
        kv["do_remote_prefill"] = False  # once a request, and so no longer to be let go
        tokens = await self._ask(kv, "read")
        if tokens:
            self.fetched_tokens += tokens
        else:
            self.failed_fetches += 1
        return tokens

    async def let_go(self, kv: dict[str, Any]) -> None:
        """The decode engine was left before it read: the prefill engine frees its blocks."""
        if kv.get("do_remote_prefill") and self.config.connector != "none":
            kv["do_remote_prefill"] = False
            await self._ask(kv, "free")

    async def give(self, name: str, wait: bool) -> int:
        """The prefill engine is read: tokens that were held under `name`; frees them."""
        if wait and name not in self.leases:
            arrival = self._arrivals.setdefault(name, asyncio.Event())
            try:
                async with asyncio.timeout(self.config.lease_s):
                    await arrival.wait()
            except TimeoutError:
                return 0
            finally:
                self._arrivals.pop(name, None)
        lease = self._free(name)
        return lease.tokens if lease else 0

    def _hold(self, name: str, rank: Rank, tokens: int) -> None:
        lease = self.leases[name] = Lease(rank, tokens)
        rank.leased_tokens += tokens
        lease.expiry = asyncio.get_running_loop().call_later(self.config.lease_s, self._expire, name)
        if arrival := self._arrivals.get(name):
            arrival.set()

    def _expire(self, name: str) -> None:
        self.expired += self._free(name) is not None

    def _free(self, name: str) -> Lease | None:
        if lease := self.leases.pop(name, None):
            if lease.expiry:
                lease.expiry.cancel()
            lease.rank.leased_tokens -= lease.tokens
            lease.rank.pump()
        return lease

    def close(self) -> None:
        """Free everything, as a process that ends does."""
        for name in tuple(self.leases):
            self._free(name)

    async def _ask(self, kv: dict[str, Any], what: str) -> int:
        mooncake = self.config.connector == "mooncake"
        if any(kv.get(name) is None for name in (MOONCAKE_NEEDS if mooncake else NIXL_NEEDS)):
            return 0
        if mooncake:
            address = urlsplit(kv["remote_bootstrap_addr"])
            host, port, name = address.hostname or "", address.port or 0, kv["transfer_id"]
        else:
            host, port, name = kv["remote_host"], kv["remote_port"], kv["remote_request_id"]
        query = f"engine={kv['remote_engine_id']}&wait={int(mooncake and what == 'read')}"
        try:
            reader, writer = await asyncio.open_connection(host, port)
            line = f"POST /mock/kv/{what}/{quote(name)}?{query} HTTP/1.1"
            writer.write(f"{line}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
        except OSError:
            return 0
        return int(answer.rpartition(b"\r\n\r\n")[2] or b"0") if answer.startswith(b"HTTP/1.1 200") else 0
