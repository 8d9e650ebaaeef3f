"""Asks the store, before a request is routed, how much of its prompt is there."""

from asyncio import get_running_loop

from deepinfer_kvstore.async_client import AsyncCheckClient
from deepinfer_kvstore.breaker import Breaker
from deepinfer_kvstore.extra_keys import ExtraKeys, Lora
from deepinfer_kvstore.questions import Answer, Question
from deepinfer_router.metrics import FAST_SECONDS, counter, histogram
from deepinfer_router.request import Request
from deepinfer_router.resumable import has_media
from deepinfer_router.store_config import StoreConfig

FAILURES = 8
"""So many questions without an answer, one after the other, and the store is left alone,"""
PAUSE_SECONDS = 0.25
"""but for one question each so many seconds."""

CHECKS = counter("checks", "Requests by how their CHECK ended: answered, or why it was not.", "result")
CHECK_SECONDS = histogram("check_seconds", "What a CHECK took, with hashing.", buckets=FAST_SECONDS)
CHECKED_TOKENS = counter("checked_tokens", "Prompt tokens that the store was asked for.")
HIT_TOKENS = counter("check_hit_tokens", "Prompt tokens that the store had.")
_FAULTS = frozenset(("timeout", "unreachable", "malformed", "version", "token", "busy"))
"""Answers that say that there is no use in asking again at once."""


class StoreCheck:
    """CHECK for requests. On the event loop; long prompts are hashed in a thread."""

    def __init__(self, config: StoreConfig) -> None:
        """Connects when first asked. Raises RouterConfigError: token or certificate cannot be had."""
        self._client = AsyncCheckClient(
            config.where(),
            token=config.token(),
            tls=config.tls(),
            budget_seconds=config.budget_s,
            connections=config.connections,
        )
        self._namespaces = config.namespaces
        self._ticket_seconds = config.ticket_s
        self._breaker = Breaker(FAILURES, PAUSE_SECONDS)
        self._seconds = CHECK_SECONDS.labels()
        self._checked = CHECKED_TOKENS.labels()
        self._hit = HIT_TOKENS.labels()

    async def check(self, request: Request, lora: Lora | None = None) -> None:
        """Fill in how many tokens the store has, and the ticket for them.

        Whatever the store does, this ends within its budget and the time of hashing; nothing is filled in then.
        """
        tokens = request.token_ids
        if not tokens or has_media(request.fields) or request.fields.get("prompt_embeds"):
            CHECKS.labels("media" if tokens else "no_token_ids").inc()  # what media hash to only the engine knows
            return
        if not self._breaker.admit():
            CHECKS.labels("store_is_down").inc()
            return
        began = get_running_loop().time()
        alive = False
        try:
            answer = await self._client.check(self._question(request, tokens, lora))
            alive = answer.reason not in _FAULTS
        except ValueError:  # token ids that are none: the engine says so
            answer, alive = Answer(reason="bad_token_ids"), True
        finally:  # a client that leaves says nothing of the store, and may have been its only probe
            if alive:
                self._breaker.succeeded()
            else:
                self._breaker.failed()
        CHECKS.labels(answer.reason or "answered").inc()
        if answer.reason:
            return
        self._seconds.observe(get_running_loop().time() - began)
        work = request.work
        work.hit_tokens = min(answer.hit_tokens, work.prompt_tokens)
        self._checked.inc(work.prompt_tokens)
        self._hit.inc(work.hit_tokens)
        request.ticket = answer.ticket
        if answer.ticket:
            request.changes["kv_transfer_params"]["kvstore"]["ticket"] = answer.ticket.hex()

    async def close(self) -> None:
        """Idempotent."""
        await self._client.close()

    def _question(self, request: Request, tokens: list[int], lora: Lora | None) -> Question:
        work = request.work
        return Question(
            self._namespaces.get(work.model, ""),
            tokens,
            extra=ExtraKeys(salt=request.cache_salt, lora=lora),
            conversation=f"{work.tenant}\0{work.session}" if work.session else None,
            ticket_seconds=self._ticket_seconds,
            tenant=work.tenant,
        )
