"""Embeddings, rerank, score, tokenize and models of the mock engine: numbers that follow from the tokens."""

from __future__ import annotations

import time
from typing import Any
from zlib import crc32

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_requests import Refused, chat_prompt

DIMENSIONS = 8


def embeddings(body: dict[str, Any], model: str) -> dict[str, Any]:
    """As POST /v1/embeddings. Raises Refused."""
    texts = _texts(body.get("input"), "input")
    data = [{"object": "embedding", "index": index, "embedding": _vector(text)} for index, text in enumerate(texts)]
    return {
        "id": "embd-0",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage(texts),
    }


def rerank(body: dict[str, Any], model: str) -> dict[str, Any]:
    """As POST /rerank: the best first. Raises Refused."""
    (query,) = _texts(body.get("query"), "query")
    documents = _texts(body.get("documents"), "documents")
    results = [
        {"index": index, "document": {"text": text}, "relevance_score": _score(query, text)}
        for index, text in enumerate(documents)
    ]
    results.sort(key=lambda result: -result["relevance_score"])  # type: ignore[operator]
    return {
        "id": "rerank-0",
        "model": model,
        "results": results[: body.get("top_n") or None],
        "usage": _usage(documents),
    }


def score(body: dict[str, Any], model: str) -> dict[str, Any]:
    """As POST /score: one text against each. Raises Refused."""
    first = _texts(body.get("text_1") or body.get("queries"), "text_1")
    second = _texts(body.get("text_2") or body.get("documents"), "text_2")
    first = first * len(second) if len(first) == 1 else first
    data = [
        {"index": index, "object": "score", "score": _score(*pair)}
        for index, pair in enumerate(zip(first, second, strict=False))
    ]
    return {"id": "score-0", "object": "list", "model": model, "data": data, "usage": _usage(first + second)}


def tokenize(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """As POST /tokenize: of a prompt or of messages."""
    messages = body.get("messages")
    ids = chat_prompt(messages, body.get("tools")) if messages else tokens.encode(body.get("prompt") or "")
    return {"count": len(ids), "max_model_len": config.max_model_tokens, "tokens": ids, "token_strs": None}


def models(config: EngineConfig) -> dict[str, Any]:
    """As GET /v1/models."""
    kind = {"object": "model", "created": 1_700_000_000, "owned_by": "mock", "root": config.models[0], "parent": None}
    data = [{"id": name, **kind, "max_model_len": config.max_model_tokens} for name in config.models]
    return {"object": "list", "data": data}


def _texts(given: Any, name: str) -> list[list[int]]:
    if isinstance(given, str):
        return [tokens.encode(given)]
    if isinstance(given, list) and given:
        if isinstance(given[0], int):
            return [given]
        return [tokens.encode(one) if isinstance(one, str) else list(one) for one in given]
    raise Refused(400, f"{name}: a text or a list is required")


def _vector(ids: list[int]) -> list[float]:
    return [crc32(bytes(token & 255 for token in ids), place) / 2**32 for place in range(DIMENSIONS)]


def _score(query: list[int], text: list[int]) -> float:
    return len(set(query) & set(text)) / max(1, len(set(query) | set(text)))


def _usage(texts: list[list[int]]) -> dict[str, Any]:
    count = sum(map(len, texts))
    return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
