"""A slot's header: every wrong bit is a flaw, and nothing raises."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import HEADER_BYTES
from deepinfer_kvstore.header import PACKED_BYTES, Flaw, Seal, SlotHeader
from deepinfer_kvstore.keys import make_key

NAMESPACE = bytes(range(32))
KEY = make_key(7, b"k" * 32)
SECRET = b"s" * 32


def entry(length: int, generation: int = 5 << 32 | 9) -> Entry:
    return Entry(Location(1, 2, 3, generation), length, b"parent__", 128, 1000, 1000, 1, 77)


def written(seal: Seal, payload: bytes, generation: int = 5 << 32 | 9) -> bytearray:
    header = bytearray(b"\xaa" * HEADER_BYTES)
    seal.write(memoryview(header), KEY, entry(len(payload), generation), memoryview(payload))
    return header


def test_a_header_tells_all_that_an_index_needs() -> None:
    seal = Seal(NAMESPACE)
    header = written(seal, b"payload")
    parsed = seal.parse(memoryview(header))
    assert isinstance(parsed, SlotHeader)
    assert parsed._replace(checksum=b"") == SlotHeader(KEY, 5 << 32 | 9, 7, b"", b"parent__", 128, 1000, 1, 77)
    assert header[PACKED_BYTES:] == bytes(HEADER_BYTES - PACKED_BYTES)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_payload_passes_only_as_itself(secret: bytes | None) -> None:
    seal = Seal(NAMESPACE, secret)
    payload = b"payload"
    header = memoryview(written(seal, payload))
    generation = 5 << 32 | 9
    assert seal.flaw(header, memoryview(payload), KEY, generation) is None
    assert seal.flaw(header, memoryview(b"paYload"), KEY, generation) == Flaw.CHECKSUM
    assert seal.flaw(header, memoryview(b"payloa"), KEY, generation) == Flaw.GENERATION
    assert seal.flaw(header, memoryview(payload), KEY, generation + 1) == Flaw.GENERATION
    assert seal.flaw(header, memoryview(payload), make_key(8, KEY[2:]), generation) == Flaw.GENERATION
    assert Seal(bytes(32), secret).flaw(header, memoryview(payload), KEY, generation) == Flaw.NAMESPACE


def test_zeros_are_no_header_and_a_payload_of_zeros_is_only_itself() -> None:
    """A hole, a punched slot and a slab never written read as zeros. # local-inference-lab/vllm#217"""
    seal = Seal(NAMESPACE)
    assert seal.parse(memoryview(bytes(HEADER_BYTES))) == Flaw.HEADER
    header = memoryview(written(seal, bytes(100)))
    assert seal.flaw(header, memoryview(bytes(100)), KEY, 5 << 32 | 9) is None
    assert seal.flaw(memoryview(written(seal, b"x" * 100)), memoryview(bytes(100)), KEY, 5 << 32 | 9) == Flaw.CHECKSUM


@pytest.mark.parametrize("secret", [None, SECRET])
def test_every_flipped_bit_of_a_header_is_a_flaw(secret: bytes | None) -> None:
    seal = Seal(NAMESPACE, secret)
    payload = random.Random(1).randbytes(300)
    header = written(seal, payload)
    for bit in range(PACKED_BYTES * 8):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert seal.flaw(memoryview(flipped), memoryview(payload), KEY, 5 << 32 | 9) is not None, bit


def test_every_flipped_bit_of_a_payload_is_a_flaw() -> None:
    seal = Seal(NAMESPACE)
    payload = random.Random(2).randbytes(600)
    header = memoryview(written(seal, payload))
    for bit in range(len(payload) * 8):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        assert seal.flaw(header, memoryview(flipped), KEY, 5 << 32 | 9) == Flaw.CHECKSUM, bit


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_no_header(noise: bytes) -> None:
    assert Seal(NAMESPACE).parse(memoryview(noise)) == Flaw.HEADER


def test_only_who_knows_the_secret_writes_what_is_believed() -> None:
    readers = Seal(NAMESPACE, SECRET)
    for forger in (Seal(NAMESPACE), Seal(NAMESPACE, b"t" * 32)):
        header = memoryview(written(forger, b"planted"))
        assert readers.flaw(header, memoryview(b"planted"), KEY, 5 << 32 | 9) == Flaw.MAC
    header = memoryview(written(readers, b"honest"))
    assert readers.flaw(header, memoryview(b"honest"), KEY, 5 << 32 | 9) is None
    assert Seal(NAMESPACE).flaw(header, memoryview(b"honest"), KEY, 5 << 32 | 9) is None


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(StoreConfigError, match="secret has 5 bytes, it must have 32"):
        Seal(NAMESPACE, b"short")


@pytest.mark.parametrize("secret", [None, SECRET])
def test_the_short_check_of_a_hit_agrees_with_the_long_one(secret: bytes | None) -> None:
    """It differs only in fields that say nothing of the payload, which the CRC protects for rebuilding."""
    seal = Seal(NAMESPACE, secret)
    payload = random.Random(4).randbytes(300)
    slot = bytearray(payload + written(seal, payload))
    generation, at = 5 << 32 | 9, len(payload)
    assert seal.is_whole(memoryview(slot), at, memoryview(slot)[:at], KEY, generation)
    assert not seal.is_whole(memoryview(slot), at, memoryview(slot)[: at - 1], KEY, generation)
    assert not seal.is_whole(memoryview(slot), at, memoryview(slot)[:at], KEY, generation + 1)
    assert not seal.is_whole(memoryview(slot), at, memoryview(slot)[:at], make_key(8, KEY[2:]), generation)
    for bit in range((at + HEADER_BYTES) * 8):
        slot[bit // 8] ^= 1 << bit % 8
        view = memoryview(slot)
        fast = seal.is_whole(view, at, view[:at], KEY, generation)
        slow = seal.flaw(view[at:], view[:at], KEY, generation) is None
        beside = bit // 8 in range(at + 106, at + PACKED_BYTES)
        assert fast == (slow or (beside and secret is None)), bit
        slot[bit // 8] ^= 1 << bit % 8
