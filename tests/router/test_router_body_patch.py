"""Fields of a body change, and no other: against parsing it, changing it and writing it."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_router.body_patch import DROP, patch
from deepinfer_router.errors import Refusal

NAMES = ("stream", "max_tokens", "kv_transfer_params", "str\\eam", 'a"b', "", "ключ", "}")
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4),
    max_leaves=12,
)
SPACE = st.text(" \t\r\n", max_size=3)


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """A JSON object as a client may write it: names twice, names in escapes, spaces everywhere."""
    members = draw(st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=5), VALUES), max_size=6))
    written = []
    for name, value in members:
        key = json.dumps(name)
        if draw(st.booleans()):
            key = '"' + "".join(f"\\u{ord(letter):04x}" if letter.isascii() else letter for letter in name) + '"'
        text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        written.append(f"{draw(SPACE)}{key}{draw(SPACE)}:{draw(SPACE)}{text}{draw(SPACE)}")
    inside = ",".join(written) or draw(SPACE)
    return f"{draw(SPACE)}{{{inside}}}{draw(SPACE)}".encode()


def reference(body: bytes, changes: dict[str, Any]) -> dict[str, Any]:
    """Another parser's view."""
    return {name: value for name, value in {**json.loads(body), **changes}.items() if value is not DROP}


@settings(max_examples=300)
@given(body=objects(), changes=st.dictionaries(st.sampled_from(NAMES), VALUES | st.just(DROP), max_size=4))
def test_like_the_reference(body: bytes, changes: dict[str, Any]) -> None:
    patched = patch(body, orjson.loads(body), changes)
    pairs: list[Any] = []
    assert json.loads(patched, object_pairs_hook=lambda inner: (pairs.append(inner), dict(inner))[1]) == reference(
        body, changes
    )
    for name, value in changes.items():  # parsers differ on which of two counts
        assert [key for key, _ in pairs[-1]].count(name) == (value is not DROP)


def test_where_fields_are_new_every_byte_stays() -> None:
    """sglang-router 0.3.2 drops fields that it does not know."""
    body = b' {"seed": 123456789012345678901234567890, "x" : 1.10, "user":"\\u0061}", "nested": {"stream": 1}} '
    patched = patch(body, orjson.loads(body), {"stream": True, "kv": 1, "gone": DROP})
    assert patched == body[:-2] + b',"stream":true,"kv":1}'


def test_nothing_to_change_is_the_very_same() -> None:
    body = b' { "a" : 1 } '
    assert patch(body, {"a": 1}, {"b": DROP}) is body


@pytest.mark.parametrize(
    ("body", "changes", "expected"),
    [
        (b"{}", {"a": 1}, b'{"a":1}'),
        (b"{ }", {"a": 1}, b'{ "a":1}'),
        (b'{"b":2}', {"a": 1}, b'{"b":2,"a":1}'),
        (b'{"a":2}', {"a": DROP}, b"{}"),
        (b'{"a":2, "b":3}', {"a": None}, b'{"a":null,"b":3}'),
        (b'{"a":1, "a":2}', {"a": DROP}, b"{}"),
    ],
)
def test_small_ones(body: bytes, changes: dict[str, Any], expected: bytes) -> None:
    assert patch(body, orjson.loads(body), changes) == expected


def test_what_nests_too_deep_to_be_written_is_refused() -> None:
    body = b'{"stream":false,"x":' + b"[" * 900 + b"]" * 900 + b"}"
    with pytest.raises(Refusal, match="less deep"):
        patch(body, orjson.loads(body), {"stream": True})
    assert orjson.loads(patch(body, orjson.loads(body), {"new": 1}))["new"] == 1
