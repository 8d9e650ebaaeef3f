"""Cutting slots into shards, telling bad ones, and putting slots together from any k."""

import itertools
import os
import random

import numpy as np
import pytest

from deepinfer_kvstore.code import Code
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.shards import Shards

CODE = Code(3, 2)
WRITE = (1 << 63, 7)


def cut(shards: Shards, content: bytes, first_slot: int = 5) -> np.ndarray:
    rows = np.full((shards.code.shards, len(content) // shards.slot_bytes, shards.stored_bytes), 255, np.uint8)
    shards.cut(rows, first_slot, [memoryview(content)], WRITE)
    return rows


def split(content: bytearray, seed: int) -> list[memoryview]:
    """`content` in pieces of any length."""
    rng = random.Random(seed)
    ends = sorted(rng.sample(range(1, len(content)), rng.randrange(6)))
    return [memoryview(content)[a:b] for a, b in itertools.pairwise([0, *ends, len(content)])]


@pytest.mark.parametrize("text", ["10", "10+", "+2", "0+2", "10+0", "30+3", "a+b", "-1+2", "10 + 2"])
def test_a_code_is_written_k_plus_m(text: str) -> None:
    with pytest.raises(StoreConfigError, match="erasure code"):
        Code.parse(text)


def test_a_code_reads_as_it_was_written() -> None:
    assert str(Code.parse("10+2")) == "10+2"


@pytest.mark.parametrize(("slot_bytes", "stored"), [(118_784, 12_288), (212_992, 24_576), (131_072, 16_384)])
def test_ten_shards_take_little_more_than_their_slot(slot_bytes: int, stored: int) -> None:
    shards = Shards(Code(10, 2), slot_bytes, 1)
    assert shards.stored_bytes == stored
    assert shards.shard_bytes * 10 >= slot_bytes


@pytest.mark.parametrize("slot_bytes", [4096, 12_288, 45_056])
def test_every_choice_of_k_shards_gives_the_slot(slot_bytes: int) -> None:
    shards = Shards(CODE, slot_bytes, 9)
    content = os.urandom(2 * slot_bytes)
    rows = cut(shards, content)
    for seed, indices in enumerate(itertools.combinations(range(5), 3)):
        got = bytearray(2 * slot_bytes)
        computed = [
            shards.join(rows, slot, indices, pieces) for slot, pieces in enumerate(shards.by_slot(split(got, seed)))
        ]
        assert got == content
        assert computed == [sum(index >= 3 for index in indices)] * 2


def test_pieces_of_any_length_are_cut_like_one() -> None:
    shards = Shards(CODE, 8192, 9)
    content = bytearray(os.urandom(4 * 8192))
    whole = cut(shards, bytes(content))
    for seed in range(20):
        rows = np.zeros_like(whole)
        shards.cut(rows, 5, split(content, seed), WRITE)
        assert (rows == whole).all()


def test_data_shards_are_the_bytes_of_the_slot_in_order() -> None:
    shards = Shards(CODE, 8192, 9)
    content = os.urandom(8192)
    rows = cut(shards, content)
    assert rows[:3, 0, : shards.shard_bytes].tobytes()[:8192] == content
    assert not rows[:3, 0, : shards.shard_bytes].reshape(-1)[8192:].any()


def test_nothing_of_what_the_memory_held_before_is_stored() -> None:
    shards = Shards(CODE, 8192, 9)
    rows = cut(shards, bytes(8192))
    assert not rows[:, :, shards.shard_bytes + 48 :].any()
    assert not rows[:, :, : shards.shard_bytes].any()


def test_a_flip_of_any_byte_that_counts_is_seen() -> None:
    shards = Shards(CODE, 4096, 9)
    rows = cut(shards, os.urandom(2 * 4096))
    used = shards.shard_bytes + 48
    for at in [*range(0, shards.shard_bytes, 97), *range(shards.shard_bytes, used)]:
        rows[4, 1, at] ^= 16
        whole, writes, bad = shards.check(rows, 5, [0, 4])
        rows[4, 1, at] ^= 16
        other_write = writes[1, 1].tolist() != list(WRITE)  # it is whole, and of a write that nobody else is of
        assert whole.tolist() == [[True, True], [True, other_write]]
        assert bad == (not other_write)


def test_shards_of_another_place_or_set_are_bad_and_unwritten_ones_are_not_counted() -> None:
    shards = Shards(CODE, 4096, 9)
    rows = cut(shards, os.urandom(4096))
    assert shards.check(rows, 5, range(5))[0].all()
    assert not shards.check(rows, 6, range(5))[0].any()
    assert not Shards(CODE, 4096, 10).check(rows, 5, range(5))[0].any()
    whole, _, bad = shards.check(rows[[1, 0, 2, 3, 4]], 5, range(5))
    assert (whole[:, 0].tolist(), bad) == ([False, False, True, True, True], 2)
    whole, _, bad = shards.check(np.zeros_like(rows), 5, range(5))
    assert not whole.any()
    assert bad == 0


@pytest.mark.parametrize("wanted", range(5))
def test_a_lost_shard_is_restored_byte_for_byte(wanted: int) -> None:
    shards = Shards(CODE, 8192, 9)
    rows = cut(shards, os.urandom(8192))
    others = [index for index in range(5) if index != wanted]
    for indices in itertools.combinations(others, 3):
        broken = rows.copy()
        broken[wanted] = 170
        shards.restore(broken, 0, indices, wanted)
        assert (broken == rows).all()
