"""Encodes conversations beside the event loop, each once."""

import sys
from asyncio import get_running_loop
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter

import orjson

from deepinfer_router.errors import Refusal
from deepinfer_router.metrics import FAST_SECONDS, REGISTRY, counter, gauge, histogram
from deepinfer_router.recipe_config import RecipeConfig
from deepinfer_router.recipe_encoding import Encoded, RecipeEncoder, why_not_encoded
from deepinfer_router.request import Request
from deepinfer_router.resumable import has_media
from deepinfer_router.tool_schema import with_strict_parameters

ENCODINGS = counter("encodings", "Conversations by who encoded them: recipe, or why the engine has to.", "result")
ENCODE_SECONDS = histogram("encode_seconds", "What encoding a conversation took in its thread.", buckets=FAST_SECONDS)
ENCODE_WAIT_SECONDS = histogram("encode_wait_seconds", "What it waited for a thread.", buckets=FAST_SECONDS)
ENCODED_TOKENS = counter("encoded_tokens", "Tokens of conversations that were encoded here.")
SWITCH_SECONDS = 0.0005
"""How long the event loop waits for a thread that encodes, at most, where that does so in Python: not Python's 5 ms."""
CACHE_BYTES = gauge("encode_cache_bytes", "Texts and tokens that are remembered.")


class Encoding:
    """`encoding: recipe`."""

    def __init__(self, config: RecipeConfig) -> None:
        """Raises RouterConfigError: see `RecipeEncoder`."""
        self._encoder = RecipeEncoder(config)
        self._models = frozenset(config.models)
        self._threads = ThreadPoolExecutor(config.threads, "encode")
        self._seconds = ENCODE_SECONDS.labels()
        self._wait_seconds = ENCODE_WAIT_SECONDS.labels()
        self._tokens = ENCODED_TOKENS.labels()
        self._done = ENCODINGS.labels("recipe")
        REGISTRY.before_snapshot(self._show)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))

    async def encode(self, request: Request) -> None:
        """Fill in the token ids of a conversation, and have the engine take them. What recipe cannot do is left to it.

        Raises:
            Refusal: 400, DeepSeek's API would refuse it.
        """
        kind, fields = request.api.kind, request.fields
        why = why_not_encoded(kind, fields)
        if self._models and request.work.model not in self._models:
            why = "model"
        elif not why and has_media(fields):
            why = "media"
        if why:
            ENCODINGS.labels(why).inc()
            return
        asked_at = perf_counter()
        try:
            encoded, began, ended = await get_running_loop().run_in_executor(self._threads, self._timed, request)
        except Refusal:
            ENCODINGS.labels("refused").inc()
            raise
        self._seconds.observe(ended - began)
        self._wait_seconds.observe(began - asked_at)
        self._tokens.inc(len(encoded.token_ids))
        self._done.inc()
        _take(request, encoded)

    def close(self) -> None:
        """Idempotent. What is being encoded ends by itself."""
        with suppress(ValueError):  # closed before
            REGISTRY.forget_refresh(self._show)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._encoder.close()

    def _timed(self, request: Request) -> tuple[Encoded, float, float]:
        began = perf_counter()
        encoded = self._encoder.encode(request.api.kind, request.fields, request.cache_salt or "")
        return encoded, began, perf_counter()

    def _show(self) -> None:
        CACHE_BYTES.labels().set(self._encoder.cache_bytes)


def _take(request: Request, encoded: Encoded) -> None:
    fields, changes = request.fields, request.changes
    request.token_ids = encoded.token_ids
    request.work.prompt_tokens = len(encoded.token_ids)
    said = changes.get("kv_transfer_params", fields.get("kv_transfer_params"))
    ids = orjson.Fragment(encoded.as_json)
    changes["kv_transfer_params"] = {**(said if isinstance(said, dict) else {}), "prompt_token_ids": ids}
    # The engine's parser has to begin where the prompt ends.
    kwargs = fields.get("chat_template_kwargs")
    thinking = {"thinking": encoded.thinking, "enable_thinking": encoded.thinking}
    changes["chat_template_kwargs"] = {**(kwargs if isinstance(kwargs, dict) else {}), **thinking}
    tools = with_strict_parameters(request.api.kind, fields.get("tools"), encoded.strict_tools)
    if tools is not None:
        changes["tools"] = tools
