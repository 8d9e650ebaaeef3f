"""Frames and messages of CHECK: what is said is understood, anything else is refused."""

import math
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.extra_keys import ExtraKeys, Lora, MultiModal
from deepinfer_kvstore.protocol import (
    LENGTH,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    MAX_PARTS,
    MAX_TEXT_BYTES,
    CheckReply,
    CheckRequest,
    Code,
    Held,
    ProtocolError,
    pack,
    read_held,
    read_reply,
    read_request,
    unpack,
)

HASH = b"h" * 32
texts = st.text(max_size=20)
numbers = st.integers(0, 2**32 - 1)
items = st.lists(st.builds(MultiModal, texts, numbers, numbers), max_size=4).map(
    lambda found: sorted(found, key=lambda item: item.offset)
)
extras = st.builds(
    ExtraKeys,
    salt=st.none() | st.text(min_size=1, max_size=20),
    lora=st.none() | st.builds(Lora, texts, texts),
    mm=items,
)
bodies = st.one_of(
    st.tuples(st.binary(max_size=10).map(lambda data: data * 4), st.none()),
    st.tuples(st.none(), st.binary(max_size=2).map(lambda data: data * 32)),
)


def through_the_wire(message: dict[str, Any]) -> dict[str, Any]:
    frame = pack(message)
    (size,) = LENGTH.unpack(frame[: LENGTH.size])
    assert size == len(frame) - LENGTH.size
    return unpack(frame[LENGTH.size :])


@given(
    texts, bodies, st.none() | numbers, st.sampled_from([b"", HASH]), st.booleans(), st.floats(0, 3600), texts, extras
)
def test_requests_arrive_as_they_were(
    namespace: str, body: Any, length: Any, after: bytes, keep: bool, seconds: float, tenant: str, extra: ExtraKeys
) -> None:
    tokens, hashes = body
    request = CheckRequest(namespace, tokens, hashes, length or None, after, keep, seconds, tenant, extra)
    assert read_request(through_the_wire(request.message())) == request


def test_replies_arrive_as_they_were() -> None:
    for reply in (CheckReply(0, 0, "none"), CheckReply(128, 1 << 40, "store", b"t" * 16, HASH)):
        assert read_reply(through_the_wire(reply.message())) == reply
    error = ProtocolError(Code.BUSY, "later")
    with pytest.raises(ProtocolError, match="^later$") as caught:
        read_reply(through_the_wire(error.message()))
    assert caught.value.code is Code.BUSY


def test_tickets_arrive_as_they_were() -> None:
    held = Held("ab", 1.5, [(b"k" * 34, Entry(Location(1, 2, 3, 4), 5, b"p" * 8, 6, 7, 8, 9, 10))] * 3)
    assert read_held(through_the_wire(held.message())) == held
    with pytest.raises(ProtocolError):
        read_held({**held.message(), "entries": b""})


GOOD = {"namespace": "n", "tokens": b""}


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {},
        {"namespace": "n"},
        {**GOOD, "hashes": b""},
        {**GOOD, "more": 1},
        {"namespace": 1, "tokens": b""},
        {"tokens": b""},
        {**GOOD, "tokens": b"123"},
        {**GOOD, "tokens": [1, 2]},
        {"namespace": "n", "hashes": b"short"},
        {**GOOD, "after": HASH * 2},
        {**GOOD, "after": "text"},
        {**GOOD, "length": -1},
        {**GOOD, "length": True},
        {**GOOD, "length": 2**32},
        {**GOOD, "keep": 1},
        {**GOOD, "ticket_seconds": -1},
        {**GOOD, "ticket_seconds": 3601},
        {**GOOD, "ticket_seconds": math.nan},
        {**GOOD, "ticket_seconds": math.inf},
        {**GOOD, "ticket_seconds": True},
        {**GOOD, "tenant": 7},
        {**GOOD, "salt": 7},
        {**GOOD, "lora": "name"},
        {**GOOD, "lora": ["name"]},
        {**GOOD, "lora": ["name", 1]},
        {**GOOD, "mm": {}},
        {**GOOD, "mm": [["a", 1]]},
        {**GOOD, "mm": [["a", -1, 1]]},
        {**GOOD, "mm": [["a", 1, 2**32]]},
        {**GOOD, "mm": [["a", 2, 1], ["b", 1, 1]]},
    ],
)
def test_what_is_no_request_is_refused(message: object) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_request(message)
    assert caught.value.code is Code.MALFORMED and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": 1}) + b"x",
        msgpack.packb({"a": "x" * (MAX_TEXT_BYTES + 1)}),
        msgpack.packb({"a": [0] * (MAX_ITEMS + 1)}),
        msgpack.packb({str(number): 0 for number in range(65)}),
        msgpack.packb({"a": msgpack.ExtType(1, b"")})[:-1] + b"",
        msgpack.packb({"a": msgpack.Timestamp(1)}),
        b"\x81\xa1a\xdf\xff\xff\xff\xff",  # a map said to be of 4 G pairs
        b"\x81\xa1a\xc6\xff\xff\xff\xff",  # 4 G bytes
        b"\x81\xa1a" + b"\x91" * 3000,  # nested
        b"\x81\xa1\xff\x01",  # no UTF-8
    ],
)
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(body)
    assert caught.value.code is Code.MALFORMED


@pytest.mark.parametrize("part", [b"\x80", b"\x90"])
def test_a_frame_of_many_small_parts_costs_no_more_than_a_large_one(part: bytes) -> None:
    rows = b"\x81\xa1a\xdc\x0f\xa0" + (b"\xdc\x07\xff" + part * 2047) * 4000
    assert len(rows) < MAX_FRAME_BYTES
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=f"more than {MAX_PARTS} parts"):
        unpack(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_FRAME_BYTES
    pictures = [["cat", number, 1] for number in range(MAX_ITEMS)]
    assert unpack(msgpack.packb({"requests": [{"mm": pictures}] * 3}))["requests"][2]["mm"] == pictures


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_garbage_is_refused_or_understood(body: bytes) -> None:
    try:
        message = unpack(body)
        read_request(message)
    except ProtocolError:
        pass
    for read in (read_reply, read_held):
        with pytest.raises(ProtocolError):
            read({"x": body})  # type: ignore[operator]


@pytest.mark.parametrize("code", ["busy", "no such code", 7, [], None])
def test_any_refusal_is_one(code: object) -> None:
    for read in (read_reply, read_held):
        with pytest.raises(ProtocolError):
            read({"error": code, "message": 3})  # type: ignore[operator]
