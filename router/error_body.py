"""A refusal, in the form in which each API writes its errors."""

from math import ceil

import orjson

from deepinfer_router.api import Api, ErrorStyle, Kind
from deepinfer_router.errors import Refusal

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_JSON = (b"content-type", b"application/json")

Headers = list[tuple[bytes, bytes]]


def render(refusal: Refusal, api: Api) -> tuple[int, Headers, bytes]:
    """Status, headers and body of a whole answer."""
    headers = [_JSON]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, ceil(refusal.retry_after_s))))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return refusal.status, headers, orjson.dumps(_error(refusal, api))


def event(api: Api, code: str, message: str) -> bytes:
    """The event that ends a stream which cannot go on: no end marker follows it."""
    if api.kind is Kind.RESPONSES:
        error: dict[str, object] = {
            "type": "error",
            "code": code,
            "message": message,
            "param": None,
            "sequence_number": 0,
        }
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"
    if api.style is ErrorStyle.ANTHROPIC:
        error = {"type": "error", "error": {"type": "api_error", "message": f"{code}: {message}"}}
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"
    error = {"error": {"message": message, "type": code, "param": None, "code": code}}
    return b"data: " + orjson.dumps(error) + b"\n\n"


def _error(refusal: Refusal, api: Api) -> dict[str, object]:
    status, message = refusal.status, refusal.message
    if api.style is ErrorStyle.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": refusal.param, "code": refusal.code}}
