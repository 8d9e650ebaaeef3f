"""Fields of a body change, and no other byte: against parsing it, changing it and writing it."""

import json
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_router import body_patch
from deepinfer_router.body_patch import DROP, members, patch
from deepinfer_router.errors import Refusal

NAMES = ("stream", "max_tokens", "kv_transfer_params", "str\\eam", 'a"b', "", "ключ")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
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
    return {name: value for name, value in {**orjson.loads(body), **changes}.items() if value is not DROP}


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
@settings(max_examples=400)
@given(body=objects(), changes=st.dictionaries(st.sampled_from(NAMES), VALUES | st.just(DROP), max_size=4))
def test_like_the_reference(small_bytes: int, body: bytes, changes: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(body_patch, "SMALL_BYTES", small_bytes)
        patched = patch(body, orjson.loads(body), changes)
    assert orjson.loads(patched) == reference(body, changes)
    for name, value in changes.items():  # one occurrence, or none
        occurrences = [member[0] for member in members(patched) or []].count(name)
        assert occurrences == (value is not DROP)


@settings(max_examples=400)
@given(objects())
def test_members_are_cut_where_they_are(body: bytes) -> None:
    found = members(body)
    assert found is not None
    read = {name: orjson.loads(body[value:end]) for name, _, value, end in found}
    assert read == orjson.loads(body)


def test_every_other_byte_stays() -> None:
    """sglang-router 0.3.2 drops fields that it does not know, and numbers lose their digits in a parser."""
    body = (
        b'{"seed": 123456789012345678901234567890, "stream" : false, "x": 1.10, "user":"\\u0061",'
        b' "nested": {"stream": 1}, "content": "' + b'\\"stream\\":' * 5000 + b'"}'
    )
    patched = patch(body, orjson.loads(body), {"stream": True, "kv": 1})
    assert patched == body.replace(b' "stream" : false, ', b"")[:-1] + b',"stream":true,"kv":1}'


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
    ],
)
def test_small_ones(body: bytes, changes: dict[str, Any], expected: bytes) -> None:
    assert patch(body, orjson.loads(body), changes) == expected


@pytest.mark.parametrize(
    "nested", [b"[" + b"[]," * 30_000 + b"[]]", b"[" * 900 + b"]" * 900, b'["\\"", ' * 200 + b"0" + b"]" * 200]
)
def test_what_has_too_many_parts_is_written_anew(nested: bytes) -> None:
    body = b'{"stream":false,"x":' + nested + b',"pad":"' + b" " * 40_000 + b'"}'
    patched = patch(body, orjson.loads(body), {"stream": True})
    assert orjson.loads(patched) == {**orjson.loads(body), "stream": True}
    assert (members(body) is None) == (body.count(b"[]") > body_patch.MAX_STEPS)


def test_what_nests_too_deep_to_be_written_is_refused() -> None:
    body = b'{"stream":false,"x":' + b"[" * 900 + b"]" * 900 + b"}"
    with pytest.raises(Refusal, match="less deep"):
        patch(body, orjson.loads(body), {"stream": True})
    assert orjson.loads(patch(body, orjson.loads(body), {"new": 1}))["new"] == 1


def test_a_megabyte_of_escapes_takes_no_memory() -> None:
    body = b'{"stream":false,"text":"' + b"\\n" * 500_000 + b'"}'
    fields = orjson.loads(body)
    tracemalloc.start()
    patch(body, fields, {"stream": True})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(body)
