"""Requests as they come from a client, for tests of the entry: an `Incoming` without a connection."""

from dataclasses import dataclass, field
from typing import Any

import orjson

Header = tuple[bytes, bytes]


@dataclass
class Received:
    """One request."""

    route: bytes = b"/v1/chat/completions"
    body: bytes = b""
    headers: list[Header] = field(default_factory=list)
    method: bytes = b"POST"
    received_at: float = 0.0


def received(route: str, fields: dict[str, Any] | None = None, **headers: str) -> Received:
    """A POST of `fields`; in names of headers underscores are dashes."""
    given = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    return Received(route.encode(), b"" if fields is None else orjson.dumps(fields), given)


def chat(**fields: Any) -> dict[str, Any]:
    """A conversation of one message."""
    return {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **fields}
