"""One data-parallel rank of the mock engine: who runs, who waits, and when the next token is there.

Like vLLM's scheduler seen from outside: first come, first served among equal priorities; prompts are computed one after
another; a step takes longer with more requests and more KV; when the cache is full the latest request is preempted and
computed again.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Sequence
from itertools import count

from deepinfer_simulator.engine_cache import PrefixCache
from deepinfer_simulator.engine_config import EngineConfig

_arrivals = count()


class Running:
    """One answer's place in a rank."""

    __slots__ = ("cached_tokens", "held_tokens", "keys", "key", "preempted", "ready")

    def __init__(self, prompt_tokens: int, keys: Sequence[int], priority: int) -> None:
        self.held_tokens = prompt_tokens
        self.keys = keys
        self.key = (priority, next(_arrivals))
        self.cached_tokens = 0
        self.preempted = False
        self.ready: asyncio.Future[None] | None = None

    def __lt__(self, other: Running) -> bool:
        return self.key < other.key


class Rank:
    """Its requests and counts. Everything on the event loop's thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.cache = PrefixCache(config.block_tokens, config.capacity_tokens // config.block_tokens)
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.held_tokens = 0
        self.leased_tokens = 0
        """Held for decode engines that have not come yet."""
        self.preemptions = 0
        self.cache_queries = 0
        self.cache_hits = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.most_running = 0
        self._prefill_free_at = 0.0

    @property
    def usage(self) -> float:
        """Share of the KV cache that requests and leases hold."""
        return (self.held_tokens + self.leased_tokens) / self.config.capacity_tokens

    async def place(self, one: Running) -> None:
        """Wait until it fits, behind those of its priority."""
        if not self.waiting and self._fits(one):
            self._let_in(one)
            return
        one.ready = asyncio.get_running_loop().create_future()
        insort(self.waiting, one)
        await one.ready

    async def compute(self, one: Running, computed_elsewhere: int = 0) -> None:
        """Wait for the prompt, once placed; `computed_elsewhere`: its first tokens, whose KV is transferred."""
        hit = self.cache.hit_tokens(one.keys, one.held_tokens)
        self.cache_queries += one.held_tokens
        self.cache_hits += hit
        self.prompt_tokens += one.held_tokens
        one.cached_tokens = max(hit, min(computed_elsewhere, one.held_tokens - 1))
        self.cache.add(one.keys)
        if self.config.time_scale:
            now = asyncio.get_running_loop().time()
            seconds = self.config.prefill.seconds(one.held_tokens - one.cached_tokens, one.cached_tokens)
            self._prefill_free_at = max(now, self._prefill_free_at) + seconds * self.config.time_scale
            await asyncio.sleep(self._prefill_free_at - now)

    async def step(self, one: Running) -> None:
        """The time of one more token, and its place in the cache."""
        config = self.config
        if one.preempted:
            await self._again(one)
        while self.held_tokens + self.leased_tokens >= config.capacity_tokens and len(self.running) > 1:
            self._preempt(self.running[-1])
            if one.preempted:
                await self._again(one)
        one.held_tokens += 1
        self.output_tokens += 1
        self.held_tokens += 1
        if config.time_scale:
            step = config.step_s + config.step_request_s * len(self.running) + config.step_token_s * self.held_tokens
            await asyncio.sleep(step * config.time_scale)
        else:
            await asyncio.sleep(0)

    def leave(self, one: Running) -> None:
        """Done or aborted, wherever it was; for all that wait, there may be room now."""
        if one in self.waiting:
            self.waiting.remove(one)
        elif one in self.running:
            self._take_out(one)
        self.pump()

    def pump(self) -> None:
        """Let in who fits, in order."""
        while self.waiting and self._fits(self.waiting[0]):
            one = self.waiting.pop(0)
            self._let_in(one)
            if one.ready and not one.ready.done():
                one.ready.set_result(None)

    async def _again(self, one: Running) -> None:
        one.preempted = False
        await self.place(one)
        await self.compute(one)

    def _fits(self, one: Running) -> bool:
        room = self.config.capacity_tokens - self.held_tokens - self.leased_tokens
        return len(self.running) < self.config.max_sequences and (one.held_tokens <= room or not self.running)

    def _let_in(self, one: Running) -> None:
        self.running.append(one)
        self.held_tokens += one.held_tokens
        self.most_running = max(self.most_running, len(self.running))

    def _take_out(self, one: Running) -> None:
        self.running.remove(one)
        self.held_tokens -= one.held_tokens

    def _preempt(self, one: Running) -> None:
        self._take_out(one)
        one.preempted = True
        self.preemptions += 1
