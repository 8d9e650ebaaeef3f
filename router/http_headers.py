"""Header lines as lists of (lower-case name, value), and which of them end at a proxy."""

from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""RFC 9110 §7.6.1, with those of RFC 2616 §13.5.1 that it no longer lists."""

ALONE = (b"keep-alive", b"close", b"Keep-Alive")
"""Usual values of `connection`: they name no other header."""

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}


def find(headers: Headers, name: bytes) -> bytes | None:
    """First value of the lower-case `name`."""
    for key, value in headers:
        if key == name:
            return value
    return None


def status_line(status: int) -> bytes:
    """Without CRLF."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status


def end_to_end(headers: Headers) -> Headers:
    """Without those that concern one connection only: HOP_BY_HOP, and what `connection` names."""
    kept = []
    for header in headers:
        name, value = header
        if name not in HOP_BY_HOP:
            kept.append(header)
        elif name == b"connection" and value not in ALONE:
            return _without_named(headers)
    return kept


def _without_named(headers: Headers) -> Headers:
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    named -= {b"content-length", b"content-type", b"content-encoding"}
    return [header for header in headers if header[0] not in HOP_BY_HOP and header[0] not in named]


def uncoded(headers: Headers) -> Headers:
    """Of a request whose answer is to come without a content coding."""
    return [*(header for header in headers if header[0] != b"accept-encoding"), (b"accept-encoding", b"identity")]
