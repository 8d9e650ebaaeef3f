"""Changes top-level fields of a JSON body and leaves every other byte as the client sent it."""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from deepinfer_router.errors import Refusal


class _Drop:
    """Type of DROP."""

    def __repr__(self) -> str:
        return "DROP"


DROP: Final = _Drop()
"""As a field's new value: the field is taken out."""

SMALL_BYTES = 1 << 15
"""Up to here to write a body anew costs less than to look for a field in it."""
MAX_STEPS = 20_000
"""Strings and brackets that are looked at, at most, for a field (about 3 ms). A body of more is written anew."""

_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"(?>[^"\\]++|\\.)*+"', re.DOTALL)  # possessive: it remembers nothing for each escape
_SCALAR = re.compile(rb"[^\s,\]}]+")
_NESTED = re.compile(_STRING.pattern + rb"|[{}\[\]]", re.DOTALL)

Member = tuple[str, int, int, int]
"""Name, where it begins, where its value begins and where that ends."""


def patch(body: bytes, fields: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """`body` with `changes` made; `fields` is what it says, parsed.

    A field that is new is put at the end. Of a field that the body has twice both go. Where the body is small, or of
    too many parts to be searched, the whole is written anew: the same fields with the same values.

    Raises:
        Refusal: 400, its objects and arrays nest too deep to be written anew.
    """
    present = [name for name in changes if name in fields]
    if present:
        found = members(body) if len(body) > SMALL_BYTES else None
        if found is None:
            return _write({name: value for name, value in {**fields, **changes}.items() if value is not DROP})
        body = _without(body, found, changes)
    added = [(name, value) for name, value in changes.items() if value is not DROP]
    if not added:
        return body
    close = body.rindex(b"}")
    text = _write(dict(added))
    empty = len(fields) == sum(name in fields for name in changes)
    return b"".join((body[:close], b"" if empty else b",", text[1:]))


def _write(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:  # what orjson has read it can write, but for depth: to 1024 and to 254
        raise Refusal(400, "invalid_json", f"the body cannot be changed: {error}: nest objects less deep") from error


def members(body: bytes) -> list[Member] | None:
    """The members of a JSON object that has been parsed before, in their order; None: too many parts."""
    steps, found = 0, []
    at = _skip(body, body.index(b"{") + 1)
    while body[at] != 0x7D:  # }
        start = at
        at = _end(_STRING, body, at)
        name = orjson.loads(body[start:at])
        value = at = _skip(body, body.index(b":", at) + 1)
        first = body[at]
        if first == 0x22:  # "
            at = _end(_STRING, body, at)
        elif first in b"{[":
            depth = 0
            for part in _NESTED.finditer(body, at):
                steps += 1
                if steps > MAX_STEPS:
                    return None
                byte = body[part.start()]
                if byte in b"{[":
                    depth += 1
                elif byte in b"}]":
                    depth -= 1
                    if depth == 0:
                        at = part.end()
                        break
        else:
            at = _end(_SCALAR, body, at)
        steps += 1
        if steps > MAX_STEPS:
            return None
        found.append((name, start, value, at))
        at = _skip(body, at)
        if body[at] == 0x2C:  # ,
            at = _skip(body, at + 1)
    return found


def _without(body: bytes, found: list[Member], changes: Mapping[str, Any]) -> bytes:
    """`body` without the members that change. Of each other one the bytes stay, up to the next one's."""
    kept = [at for at, member in enumerate(found) if member[0] not in changes]
    if not kept:
        return b"{}"
    parts = [body[: found[0][1]]]
    runs: list[list[int]] = []
    for at in kept:
        if runs and runs[-1][1] == at - 1:
            runs[-1][1] = at
        else:
            runs.append([at, at])
    parts.append(b",".join(body[found[first][1] : found[last][3]] for first, last in runs))
    parts.append(body[found[-1][3] :])
    return b"".join(parts)


def _skip(body: bytes, at: int) -> int:
    return _end(_SPACE, body, at)


def _end(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    match = pattern.match(body, at)
    assert match is not None, "the body has been parsed as JSON"
    return match.end()
