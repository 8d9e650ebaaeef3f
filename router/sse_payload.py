"""The JSON of one server-sent event."""

from typing import Any

import orjson

DONE = b"[DONE]"


def payload(event: bytes) -> bytes:
    """The data lines of one whole event, joined; empty for a comment or an event without data."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2:
        return event[6:-2]
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


def parsed(data: bytes) -> dict[str, Any] | None:
    """The object that an event's data is; None for anything else, the end mark too."""
    if not data.startswith(b"{"):
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def written(chunk: dict[str, Any]) -> bytes:
    """An event with this object."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
