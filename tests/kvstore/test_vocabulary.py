"""Keys, entries, descriptors and transfers: what all parts of the store agree on."""

import json
from dataclasses import fields, replace
from threading import Thread
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.entry import PACKED_BYTES, Entry, Location
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.keys import make_key, schema_of
from deepinfer_kvstore.transfer import Transfer

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)

DESCRIPTOR = Descriptor(
    model="m",
    weights="w",
    kv_dtype="bfloat16",
    record_format="bf16",
    layout="l",
    hash_algorithm="sha256_cbor",
    none_hash="00",
    hash_tokens=32,
    shards="1",
    groups=(Group(schema=1, tokens_per_block=64, payload_bytes=100), Group(2, 32, 50, window_tokens=128)),
)
OTHER = {"hash_tokens": 64, "groups": DESCRIPTOR.groups[:1], "format_version": 2}


def test_a_key_is_its_schema_then_its_hash() -> None:
    key = make_key(0x0102, b"h" * 32)
    assert key == b"\x01\x02" + b"h" * 32
    assert schema_of(key) == 0x0102


@pytest.mark.parametrize("length", [0, 8, 31, 33])
def test_a_hash_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"has {length} bytes.*sha256_cbor"):
        make_key(1, b"h" * length)


@given(U32, U32, U32, U64, U32, st.binary(min_size=8, max_size=8), U32, U64, U64, st.integers(0, 255), U32)
def test_an_entry_unpacks_to_what_was_packed(
    writer: int, slab: int, slot: int, generation: int, length: int, parent: bytes, depth: int, created: int,
    touched: int, ttl_class: int, tenant: int,
) -> None:  # fmt: skip
    location = Location(writer, slab, slot, generation)
    entry = Entry(location, length, parent, depth, created, touched, ttl_class, tenant)
    assert len(entry.pack()) == PACKED_BYTES == 57
    assert Entry.unpack(entry.pack()) == entry


@pytest.mark.parametrize("field", [field.name for field in fields(Descriptor)])
def test_every_field_changes_the_digest(field: str) -> None:
    changed = replace(DESCRIPTOR, **{field: OTHER.get(field, "other")})
    assert changed.digest() != DESCRIPTOR.digest()
    assert changed.directory != DESCRIPTOR.directory


@pytest.mark.parametrize("field", [field.name for field in fields(Group)])
def test_every_field_of_a_group_changes_the_digest(field: str) -> None:
    group = replace(DESCRIPTOR.groups[0], **{field: 7})
    assert replace(DESCRIPTOR, groups=(group, DESCRIPTOR.groups[1])).digest() != DESCRIPTOR.digest()


def test_a_descriptor_reads_back_what_it_wrote() -> None:
    assert Descriptor.from_json(DESCRIPTOR.to_json(), "meta.json") == DESCRIPTOR
    assert DESCRIPTOR.payload_bytes == 100


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a store's meta.json"),
        ("[]", "not a store's meta.json"),
        ("3", "not a store's meta.json"),
        (json.dumps({"format_version": 9}), "store format 9, this version reads 1"),
        (json.dumps({"format_version": 1, "model": "m"}), "missing or unknown"),
        (DESCRIPTOR.to_json().replace('"schema"', '"scheme"'), "not a store's meta.json"),
        (
            json.dumps({**json.loads(DESCRIPTOR.to_json()), "model": [[]]}),
            r"not a store's meta.json \(model is \[\[\]\]\)",
        ),
        (json.dumps({**json.loads(DESCRIPTOR.to_json()), "hash_tokens": True}), "hash_tokens is True"),
        (
            DESCRIPTOR.to_json().replace('"model": "', '"model": ' + "[" * 900 + "]" * 900 + ', "x": "'),
            "missing or unknown",
        ),
    ],
)
def test_another_file_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(StoreConfigError, match=said) as raised:
        Descriptor.from_json(text, "/kv/meta.json")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("/kv/meta.json: ")


def test_a_transfer_ends_with_its_last_block() -> None:
    transfer = Transfer(2, deadline=monotonic() + 60)
    seen: list[list[bool]] = []
    transfer.when_done(lambda done: seen.append(done.results()))
    transfer.settle(1, True, 10)
    assert (transfer.done(), transfer.results(), seen) == (False, [False, True], [])
    transfer.settle(0, False, 10)
    assert (transfer.done(), transfer.results(), seen) == (True, [False, True], [[False, True]])
    assert transfer.bytes_moved == 10
    transfer.when_done(lambda done: seen.append([]))
    assert seen[-1] == []


def test_a_transfer_of_nothing_is_done() -> None:
    assert Transfer(0, deadline=0).wait(0)


def test_a_transfer_past_its_deadline_is_overdue_until_it_ends() -> None:
    transfer = Transfer(1, deadline=monotonic() - 1)
    assert transfer.overdue()
    assert not transfer.wait(0)
    transfer.settle(0, True, 1)
    assert not transfer.overdue()


def test_waiting_ends_when_another_thread_settles() -> None:
    transfer = Transfer(1, deadline=monotonic() + 60)
    thread = Thread(target=transfer.settle, args=(0, True, 5))
    thread.start()
    assert transfer.wait(30)
    thread.join()
    assert transfer.results() == [True]
