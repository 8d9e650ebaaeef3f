"""Requests of a trace: when they came, how long they were, and which prefix blocks they share.

Files are JSON Lines as Mooncake publishes them (timestamp in ms, input_length, output_length, hash_ids: one id a block
of 512 tokens) with three optional fields of ours (session_id, images, slo_ms), or CSV as Azure publishes it (TIMESTAMP,
ContextTokens, GeneratedTokens). Either may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
"""Of one hash id of a Mooncake trace."""


class TraceError(ValueError):
    """A trace that cannot be read: file, line, value and remedy, in one line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at: float
    """Seconds from the start of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of its prefix blocks, in order: equal ids are equal tokens after equal tokens."""
    session: str = ""
    images: int = 0
    slo_s: float | None = None
    """Seconds within which its first token is wanted."""
    hit_tokens: int = 0
    """Of the prompt, already in a store that all engines share: see `with_hits`."""


def read(path: Path) -> list[TraceRequest]:
    """Every request, in order of time. Raises TraceError."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}: name a trace in JSON Lines or CSV, gzipped or not") from None
    parse = _azure if lines and lines[0].startswith("TIMESTAMP,") else _mooncake
    found = sorted(parse(path, lines), key=lambda request: request.at)
    if not found:
        raise TraceError(f"{path}: no request: name a trace in JSON Lines or CSV, gzipped or not")
    start = found[0].at
    return [replace(request, at=request.at - start) for request in found] if start else found


def _mooncake(path: Path, lines: Sequence[str]) -> Iterable[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield TraceRequest(
                at=_milliseconds(row["timestamp"]),
                input_tokens=_tokens(row["input_length"], 1),
                output_tokens=_tokens(row["output_length"], 0),
                blocks=_ids(row.get("hash_ids", [])),
                session=str(row.get("session_id", "")),
                images=_tokens(row.get("images", 0), 0),
                slo_s=None if row.get("slo_ms") is None else _milliseconds(row["slo_ms"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            wanted = '{"timestamp": ms, "input_length": 1 or more, "output_length": 0 or more, "hash_ids": [...]}'
            raise TraceError(f"{path} line {number}: {type(error).__name__} {error}: a line is {wanted}") from None


def _azure(path: Path, lines: Sequence[str]) -> Iterable[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            yield TraceRequest(
                # seven digits of a second, of which Python 3.11 reads six
                at=datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                input_tokens=_tokens(int(row["ContextTokens"]), 1),
                output_tokens=_tokens(int(row["GeneratedTokens"]), 0),
            )
        except (ValueError, TypeError, KeyError) as error:
            wanted = "TIMESTAMP,ContextTokens,GeneratedTokens with 2023-11-16 18:17:03.97,4808,10"
            raise TraceError(f"{path} line {number}: {type(error).__name__} {error}: {wanted}") from None


def _milliseconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or not isfinite(value):
        raise ValueError(f"{value!r} milliseconds")
    return value / 1000


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(id, int) for id in value):
        raise ValueError(f"hash_ids {str(value)[:60]}")
    return tuple(value)


def _tokens(value: Any, least: int) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} tokens")
    return value


def write(requests: Iterable[TraceRequest], path: Path) -> None:
    """As JSON Lines that `read` reads; gzipped where the name ends so."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        for request in requests:
            row: dict[str, Any] = {
                "timestamp": round(request.at * 1000),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.blocks),
            }
            if request.session:
                row["session_id"] = request.session
            if request.images:
                row["images"] = request.images
            if request.slo_s is not None:
                row["slo_ms"] = request.slo_s * 1000
            file.write(json.dumps(row) + "\n")


def with_hits(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Fill in `hit_tokens` as a store of unbounded size would: the longest prefix of blocks that an earlier request
    had."""
    seen: set[int] = set()
    found = []
    for request in requests:
        blocks = 0
        while blocks < len(request.blocks) and request.blocks[blocks] in seen:
            blocks += 1
        seen.update(request.blocks)
        found.append(replace(request, hit_tokens=min(blocks * BLOCK_TOKENS, request.input_tokens - 1)))
    return found


def scaled(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests with prompts `factor` times as long, hits too; for lengths that no public trace has."""
    if factor <= 0:
        raise ValueError(f"lengths times {factor}: must be above 0")
    found = []
    for request in requests:
        length = max(1, round(request.input_tokens * factor))
        hit = min(round(request.hit_tokens * factor), length - 1)
        found.append(replace(request, input_tokens=length, hit_tokens=hit))
    return found
