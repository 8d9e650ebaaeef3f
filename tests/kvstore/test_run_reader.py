"""Runs read and checked in C: what Python does with the same slots, whatever has become of them."""

import errno
import os
import random
from pathlib import Path

import pytest

from deepinfer_kvstore import native
from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.geometry import HEADER_BYTES, PAGE_BYTES, Geometry
from deepinfer_kvstore.header import Seal
from deepinfer_kvstore.posix import PosixBackend, PosixSlab
from deepinfer_kvstore.run_reader import RunReader, _compiled
from deepinfer_kvstore.slot_run import SlotRun
from store_case import aligned, get, key, open_store, payload, put

SLOT = 8192
SLOTS = 12
SEAL = Seal(bytes(range(32)))
MOST = SLOT - HEADER_BYTES


def reader(call_slots: int = 5) -> RunReader:
    made = RunReader.make(SEAL.prefix, SLOT, call_slots)
    assert made is not None, "this machine has no C compiler, or its xxhash hides its library"
    return made


def generation(number: int) -> int:
    return (number << 32) + 7


def filled(tmp_path: Path, lengths: list[int]) -> PosixSlab:
    """A slab in which slot n holds block n."""
    slab = PosixBackend(tmp_path, Geometry(SLOT, SLOTS)).create("a.slab", SLOT, SLOTS)
    for number, length in enumerate(lengths):
        slot, body = aligned(SLOT), payload(number, length)
        slot[:length] = body
        entry = Entry(Location(1, 1, number, generation(number)), length, bytes(8), 64, 1, 1, 1, 0)
        SEAL.write(slot[-HEADER_BYTES:], key(number), entry, memoryview(body))
        slab.writev(number, [slot])
    return slab


def in_python(slab: PosixSlab, first: int, lengths: list[int]) -> tuple[list[bool], list[bytes]]:
    """The same with the store's own Python."""
    whole, payloads = [], []
    for at, length in enumerate(lengths):
        slot = aligned(SLOT)
        slab.readv(first + at, [slot])
        number = first + at
        whole.append(SEAL.is_whole(slot, SLOT - HEADER_BYTES, slot[:length], key(number), generation(number)))
        payloads.append(bytes(slot[:length]))
    return whole, payloads


def run_of(first: int, lengths: list[int]) -> SlotRun:
    numbers = range(first, first + len(lengths))
    keys, generations = [key(n) for n in numbers], [generation(n) for n in numbers]
    return SlotRun(1, 1, first, range(len(lengths)), keys, generations, [aligned(length) for length in lengths])


def result(found: bytes | None, run: SlotRun) -> tuple[list[bool], list[bytes]]:
    assert found is not None
    return [bool(each) for each in found], [bytes(buffer) for buffer in run.buffers]


def in_c(slab: PosixSlab, first: int, lengths: list[int], call_slots: int) -> tuple[list[bool], list[bytes]]:
    run = run_of(first, lengths)
    return result(reader(call_slots).read(slab.read_fd, run, aligned(call_slots * SLOT)), run)


def checked_in_c(slab: PosixSlab, first: int, lengths: list[int]) -> tuple[list[bool], list[bytes]]:
    """The same after another has read."""
    run, bounce, begin = run_of(first, lengths), aligned(SLOTS * SLOT), 0
    pieces: list[memoryview] = []
    for buffer in run.buffers:
        pages = len(buffer) // PAGE_BYTES * PAGE_BYTES
        pieces += [buffer[:pages], bounce[begin : begin + SLOT - pages]]
        begin += SLOT - pages
    slab.readv(first, [piece for piece in pieces if piece])
    return result(reader().check(run, bounce), run)


@pytest.mark.parametrize("seed", range(40))
def test_what_c_finds_is_what_python_finds(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    edges = [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, MOST]
    lengths = [chance.choice([*edges, chance.randint(1, MOST)]) for _ in range(SLOTS)]
    slab = filled(tmp_path, lengths)
    for _ in range(chance.randint(0, 6)):  # anywhere, and where every bit counts
        slot, place = chance.randrange(SLOTS), chance.choice([0, MOST, MOST + chance.randrange(106)])
        byte = os.pread(slab.fd, 1, slot * SLOT + place)
        os.pwrite(slab.fd, bytes([byte[0] ^ 1 << chance.randrange(8)]), slot * SLOT + place)
    first = chance.randrange(SLOTS)
    asked = lengths[first : first + chance.randint(1, SLOTS)]
    if chance.random() < 0.3:
        asked[0] = max(1, asked[0] - 1)  # another length than was stored
    expected = in_python(slab, first, asked)
    assert in_c(slab, first, asked, chance.randint(1, SLOTS)) == expected
    assert checked_in_c(slab, first, asked) == expected
    slab.close()


def test_every_bit_of_what_names_a_block_counts(tmp_path: Path) -> None:
    slab = filled(tmp_path, [MOST])
    assert in_c(slab, 0, [MOST], 1)[0] == [True]
    for place in range(MOST, MOST + 106):
        [byte] = os.pread(slab.fd, 1, place)
        os.pwrite(slab.fd, bytes([byte ^ 1]), place)
        assert in_c(slab, 0, [MOST], 1)[0] == [False], place
        os.pwrite(slab.fd, bytes([byte]), place)
    slab.close()


def test_a_read_that_fails_or_ends_early_is_left_to_python(tmp_path: Path) -> None:
    slab = filled(tmp_path, [MOST] * SLOTS)
    run = run_of(0, [MOST] * 4)
    os.ftruncate(slab.fd, 3 * SLOT + 100)
    assert reader().read(slab.read_fd, run, aligned(5 * SLOT)) is None
    slab.close()
    assert reader().read(slab.read_fd, run, aligned(5 * SLOT)) is None


def test_the_store_reads_in_c_where_it_can_and_the_same_in_python(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, range(20))
    assert store._loads.reads.reader is not None
    compiled = get(store, range(24))
    store._loads.reads.reader = None
    assert compiled == get(store, range(24)) == [*(payload(n) for n in range(20)), *[None] * 4]
    store.close()


def test_buffers_that_the_disk_cannot_take_are_filled_all_the_same(tmp_path: Path) -> None:
    """O_DIRECT needs aligned memory."""
    store = open_store(tmp_path)
    put(store, [1])
    memory = aligned(3 * PAGE_BYTES)
    transfer = store.get([key(1)], [memory[1:6001]])
    assert transfer.wait(30) and transfer.results() == [True]
    assert bytes(memory[1:6001]) == payload(1)
    store.close()


def test_macs_are_checked_in_python(tmp_path: Path) -> None:
    store = open_store(tmp_path, secret=bytes(32))
    assert store._loads.reads.reader is None
    put(store, [1])
    assert get(store, [1]) == [payload(1)]
    store.close()


def test_without_a_compiler_python_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "no C compiler")

    _compiled.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(native, "compiler", none)
        store = open_store(tmp_path)
        assert store._loads.reads.reader is None
        put(store, [1])
        assert get(store, [1]) == [payload(1)]
        store.close()
    _compiled.cache_clear()
