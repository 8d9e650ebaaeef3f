"""The erasure-coded back end: every byte right up to m losses, a zeroed slot beyond, and no root holds up another."""

import logging
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roots_in_memory import Root, erasure

from deepinfer_kvstore.code import Code
from deepinfer_kvstore.erasure import ErasureBackend
from deepinfer_kvstore.erasure_slab import ErasureSlab
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.root_lane import Lane

SLOT = 4096
GEOMETRY = Geometry(SLOT, 32)
CODE = Code(4, 2)
NAME = "00000001-00000000.slab"


@contextmanager
def opened(backend: ErasureBackend, *, create: bool = True) -> Iterator[ErasureSlab]:
    slab = backend.create(NAME, SLOT, GEOMETRY.slab_slots) if create else backend.open(NAME, write=True)
    try:
        yield slab
    finally:
        slab.close()
        backend.close()


def six_roots() -> list[Root]:
    return [Root() for _ in range(CODE.shards)]


def write(slab: ErasureSlab, first: int, content: bytes) -> None:
    slab.writev(first, [memoryview(content)])


def read(slab: ErasureSlab, first: int, slots: int = 1) -> bytes:
    got = bytearray(b"\xaa" * (slots * SLOT))
    slab.readv(first, [memoryview(got)])
    return bytes(got)


def root_of(roots: list[Root], slab: ErasureSlab, shard: int) -> Root:
    """The root that holds a shard of every slot of `slab`."""
    return roots[int(slab.lanes[shard].name.removeprefix("root"))]


def let_end(lanes: Iterable[Lane], *, write: bool) -> None:
    """Wait until the lanes have done what they were asked for."""
    for lane in lanes:
        done = Event()
        lane.do(done.set, write=write)
        assert done.wait(30)


def test_slots_read_back_through_any_pieces() -> None:
    with opened(erasure(six_roots(), GEOMETRY, CODE)) as slab:
        content = os.urandom(5 * SLOT)
        slab.writev(3, [memoryview(content)[:777], memoryview(content)[777:9000], memoryview(content)[9000:]])
        assert read(slab, 3, 5) == content
        assert read(slab, 5, 2) == content[2 * SLOT : 4 * SLOT]
        assert read(slab, 0, 1) == bytes(SLOT)


@settings(max_examples=40)
@given(st.data())
def test_random_writes_and_damage_against_a_dict(data: st.DataObject) -> None:
    """Up to m shards of a slot spoilt: its bytes. More: its bytes or zeros, never others."""
    roots = six_roots()
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    model: dict[int, bytes] = {}
    spoilt: dict[int, set[int]] = {}
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        stored = backend.shards.stored_bytes
        for _ in range(data.draw(st.integers(1, 12))):
            first = rng.randrange(24)
            count = rng.randrange(1, 8)
            action = rng.choice(["write", "write", "spoil", "old", "read"])
            if action == "write":
                content = rng.randbytes(count * SLOT)
                write(slab, first, content)
                let_end(backend.lanes, write=True)
                for slot in range(count):
                    model[first + slot] = content[slot * SLOT : (slot + 1) * SLOT]
                    spoilt.pop(first + slot, None)
            elif action in ("spoil", "old"):
                shard = rng.randrange(CODE.shards)
                memory = root_of(roots, slab, shard).memory(NAME)
                where = slice(first * stored, (first + 1) * stored)
                other = rng.randrange(24)
                memory[where] = rng.randbytes(stored) if action == "spoil" else bytes(memory[other * stored :][:stored])
                if action == "spoil" or other != first:
                    spoilt.setdefault(first, set()).add(shard)
            got = read(slab, first, count)
            for slot in range(count):
                found = got[slot * SLOT : (slot + 1) * SLOT]
                expected = model.get(first + slot, bytes(SLOT))
                if len(spoilt.get(first + slot, ())) <= CODE.parity:
                    assert found == expected
                else:
                    assert found in (expected, bytes(SLOT))


@pytest.mark.parametrize("lost", [(0, 1), (0, 5), (2, 4), (3, 5), (1,), ()])
def test_any_m_roots_may_be_gone(lost: tuple[int, ...]) -> None:
    roots = six_roots()
    content = os.urandom(20 * SLOT)
    with opened(erasure(roots, GEOMETRY, CODE)) as slab:
        write(slab, 2, content)
    with opened(erasure(roots, GEOMETRY, CODE, lost=lost), create=False) as slab:
        assert read(slab, 2, 20) == content
        write(slab, 0, content)  # and k roots take blocks
        assert read(slab, 0, 20) == content


def test_a_margin_wants_more_roots_for_writes_than_for_reads() -> None:
    roots = six_roots()
    with opened(erasure(roots, GEOMETRY, CODE)) as slab:
        write(slab, 0, b"a" * SLOT)
    with opened(erasure(roots, GEOMETRY, CODE, lost=(0, 3), margin=1), create=False) as slab:
        assert read(slab, 0) == b"a" * SLOT
        with pytest.raises(OSError, match=r"write: 4 of 6 roots can .*, 5 must"):
            write(slab, 0, b"b" * SLOT)


def test_more_than_m_roots_gone_is_an_error_and_no_bytes() -> None:
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        write(slab, 0, b"a" * SLOT)
        let_end(backend.lanes, write=True)
        for root in roots[:3]:
            root.fails = {"readv"}
        with pytest.raises(OSError, match="3 roots could be read, 4 must be"):
            read(slab, 0)
    with pytest.raises(OSError, match=r"open: 3 of 6 roots can .*, 4 must"):
        erasure(roots, GEOMETRY, CODE, lost=(0, 1, 2)).open(NAME, write=False)
    with pytest.raises(FileNotFoundError):
        erasure(roots, GEOMETRY, CODE).open("00000009-00000000.slab", write=False)


def test_a_slab_that_a_root_lacks_is_not_gone_while_others_are_away() -> None:
    """FileNotFoundError would have its blocks deleted."""
    roots = six_roots()
    with opened(erasure(roots, GEOMETRY, CODE, lost=(5,))) as slab:
        write(slab, 0, b"w" * SLOT)
    backend = erasure(roots, GEOMETRY, CODE, lost=(0, 1))
    with pytest.raises(OSError, match="open: 3 of 6 roots can") as failed:
        backend.open(NAME, write=False)
    assert not isinstance(failed.value, FileNotFoundError)
    backend.close()
    backend = erasure(roots, GEOMETRY, CODE, lost=(0,))
    with opened(backend, create=False) as slab:
        assert read(slab, 0) == b"w" * SLOT


def test_a_held_up_root_holds_up_no_read_and_never_touches_buffers_handed_back() -> None:
    """The read is over while the root still holds its shard; what it delivers later falls into private memory."""
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        content = os.urandom(8 * SLOT)
        write(slab, 0, content)
        let_end(backend.lanes, write=True)
        slow = root_of(roots, slab, 1)
        slow.hold("readv")
        got = bytearray(8 * SLOT)
        slab.readv(0, [memoryview(got)])
        assert got == content
        assert slow.arrived["readv"].wait(30)
        assert "readv" not in slow.calls
        got[:] = b"\xee" * len(got)
        for _ in range(5):  # arenas are in use again meanwhile
            assert read(slab, 0, 8) == content
        assert "readv" not in slow.calls
        slow.gates["readv"].set()
        let_end(backend.lanes, write=False)
        assert slow.calls.count("readv") == 1  # the reads of the others were not wanted any more, or not asked for
        assert got == b"\xee" * len(got)


def test_a_slow_root_is_asked_after_the_others_until_it_is_quick_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_kvstore.erasure._LATE_SECONDS", 30.0)  # nothing else is late, however busy we are
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        write(slab, 0, b"s" * SLOT)
        let_end(backend.lanes, write=True)
        slab.lanes[0].read_seconds = 600.0
        slab.lanes[0]._asked_at = monotonic()
        for _ in range(3):
            assert read(slab, 0) == b"s" * SLOT
        let_end(backend.lanes, write=False)
        slow = root_of(roots, slab, 0)
        assert slow.calls.count("readv") == 0
        slab.lanes[0]._asked_at = 0.0  # it has rested: it is asked beside the others, and found quick
        assert read(slab, 0) == b"s" * SLOT
        let_end(backend.lanes, write=False)
        assert slow.calls.count("readv") == 1
        assert slab.lanes[0].read_seconds < 600.0


def test_a_held_up_root_holds_up_no_write_and_gets_the_writes_in_order() -> None:
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        slow = root_of(roots, slab, 2)
        slow.hold("writev")
        for letter in b"abc":
            write(slab, 4, bytes([letter]) * SLOT)
        assert "writev" not in slow.calls
        assert read(slab, 4) == b"c" * SLOT  # its old shard is of another write, or of none
        slow.gates["writev"].set()
        let_end(backend.lanes, write=True)
        assert slow.calls.count("writev") == 3
        root_of(roots, slab, 0).fails = root_of(roots, slab, 1).fails = {"readv"}
        assert read(slab, 4) == b"c" * SLOT  # now its shard is needed


def test_what_waits_for_a_hanging_root_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """llm-d-kv-cache#616: queues without a bound."""
    monkeypatch.setattr("deepinfer_kvstore.root_lane.MAX_QUEUED_BYTES", 3 * CODE.shards * 4096)
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        slow = root_of(roots, slab, 5)
        slow.hold("writev")
        for _ in range(10):
            write(slab, 0, b"x" * SLOT)
            let_end(slab.lanes[:5], write=True)
        slow.gates["writev"].set()
        let_end(backend.lanes, write=True)
        assert slow.calls.count("writev") == 3
        assert read(slab, 0) == b"x" * SLOT


@pytest.mark.parametrize("what", ["readv", "writev", "create"])
def test_a_failing_root_is_named_once_and_the_store_goes_on(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """llm-d-kv-cache#514: a failing load killed the worker."""
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    roots[1].fails = {what}
    with caplog.at_level(logging.WARNING), opened(backend) as slab:
        for letter in b"abcdef":
            write(slab, 0, bytes([letter]) * SLOT)
            let_end(backend.lanes, write=True)
            assert read(slab, 0) == bytes([letter]) * SLOT
            let_end(backend.lanes, write=False)
            for lane in backend.lanes:
                lane._failed_at.clear()  # as if it were tried again after a while
        said = [message for message in caplog.messages if "root1" in message]
        assert len(said) == 1
        assert "made to fail" in said[0]
        assert "rebuild" in said[0]
        assert backend.lanes[1].errors == (
            1 if what == "create" else 6 if what == "writev" else backend.lanes[1].errors
        )
        assert sum(lane.errors for lane in backend.lanes) == backend.lanes[1].errors > 0


def test_a_root_that_fails_counts_as_degraded_until_it_works() -> None:
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        roots[4].fails = {"writev"}
        write(slab, 0, b"a" * SLOT)
        let_end(backend.lanes, write=True)
        assert backend.degraded() == ["root4"]
        roots[4].fails = set()
        write(slab, 0, b"b" * SLOT)
        let_end(backend.lanes, write=True)
        assert backend.degraded() == ["root4"]  # it rests
        backend.lanes[4]._failed_at[True] -= 60.0
        write(slab, 0, b"c" * SLOT)
        let_end(backend.lanes, write=True)
        assert backend.degraded() == []
    assert erasure(roots, GEOMETRY, CODE, lost=(2,)).degraded() == ["root2"]


@pytest.mark.parametrize("reached", range(CODE.shards + 1))
def test_a_crash_in_the_middle_of_a_write_gives_the_old_slot_the_new_one_or_zeros(reached: int) -> None:
    """Bytes of two writes never meet in one slot, whichever roots were reached."""
    old, new = os.urandom(SLOT), os.urandom(SLOT)
    for seed in range(5):
        roots = six_roots()
        backend = erasure(roots, GEOMETRY, CODE)
        with opened(backend) as slab:
            write(slab, 7, old)
            let_end(backend.lanes, write=True)
            before = [bytes(root.memory(NAME)) for root in roots]
            write(slab, 7, new)
            let_end(backend.lanes, write=True)
        for number in random.Random(seed).sample(range(CODE.shards), CODE.shards - reached):
            roots[number].memory(NAME)[:] = before[number]
        with opened(erasure(roots, GEOMETRY, CODE), create=False) as slab:
            found = read(slab, 7)
        if reached >= CODE.data:
            assert found == new
        elif reached <= CODE.parity:
            assert found == old
        else:
            assert found == bytes(SLOT)


def test_a_torn_shard_is_replaced() -> None:
    """New bytes before the old trailer, and the other way round."""
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        write(slab, 0, os.urandom(SLOT))
        let_end(backend.lanes, write=True)
        before = [bytes(root.memory(NAME)) for root in roots]
        new = os.urandom(SLOT)
        write(slab, 0, new)
        let_end(backend.lanes, write=True)
        half = backend.shards.shard_bytes // 2
        roots[0].memory(NAME)[:half] = before[0][:half]
        roots[3].memory(NAME)[half : backend.shards.stored_bytes] = before[3][half : backend.shards.stored_bytes]
        assert read(slab, 0) == new
        assert backend.counters.totals()["bad_shards"] > 0


def test_parity_turns_with_the_slab() -> None:
    backend = erasure(six_roots(), GEOMETRY, CODE)
    holders = {backend.lanes_of(f"00000001-{slab:08x}.slab")[CODE.data].name for slab in range(64)}
    assert holders == {lane.name for lane in backend.lanes}
    backend.close()


def test_a_root_that_was_away_gets_its_part_of_a_slab_when_its_writer_opens_it() -> None:
    roots = six_roots()
    with opened(erasure(roots, GEOMETRY, CODE, lost=(1,))):
        pass
    assert roots[1].names() == []
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend, create=False) as slab:
        assert roots[1].names() == [NAME]
        write(slab, 0, b"n" * SLOT)
        let_end(backend.lanes, write=True)
        roots[0].fails = roots[2].fails = {"readv"}
        assert read(slab, 0) == b"n" * SLOT


def test_slabs_are_created_once_listed_and_removed_on_all_roots() -> None:
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    slab = backend.create(NAME, SLOT, GEOMETRY.slab_slots)
    with pytest.raises(FileExistsError):
        backend.create(NAME, SLOT, GEOMETRY.slab_slots)
    assert backend.names() == [NAME]
    free = min(root.free_bytes() for root in roots)
    assert backend.free_bytes() == free // backend.shards.stored_bytes * SLOT
    slab.close()
    slab.close()
    roots[2].fails = {"create"}
    backend.remove(NAME)
    backend.remove(NAME)
    assert [root.names() for root in roots] == [[]] * 6
    for root in roots[:3]:
        root.fails = {"create"}
    with pytest.raises(OSError, match=r"create: 3 of 6 roots can .*made to fail.*, 4 must"):
        backend.create(NAME, SLOT, GEOMETRY.slab_slots)
    assert [root.names() for root in roots] == [[]] * 6
    backend.close()


def test_a_punched_slot_reads_as_zeros_and_its_neighbours_do_not() -> None:
    roots = six_roots()
    backend = erasure(roots, GEOMETRY, CODE)
    with opened(backend) as slab:
        write(slab, 0, b"p" * (4 * SLOT))
        slab.punch(1, 2)
        let_end(backend.lanes, write=True)
        assert read(slab, 0, 4) == b"p" * SLOT + bytes(2 * SLOT) + b"p" * SLOT


def test_readers_and_a_writer_at_once() -> None:
    """Reads of slots that are written now give one of the writes, or zeros."""
    backend = erasure(six_roots(), GEOMETRY, CODE)
    with opened(backend) as slab:
        allowed = {bytes([letter]) * SLOT for letter in range(64)} | {bytes(SLOT)}
        seen: list[bytes] = []

        def keep_reading() -> None:
            for _ in range(60):
                found = read(slab, 0, 4)
                seen.extend(found[at : at + SLOT] for at in range(0, 4 * SLOT, SLOT))

        readers = [Thread(target=keep_reading) for _ in range(3)]
        for reader in readers:
            reader.start()
        for letter in range(64):
            write(slab, 0, bytes([letter]) * (4 * SLOT))
        for reader in readers:
            reader.join()
        assert set(seen) <= allowed
        let_end(backend.lanes, write=True)
        assert read(slab, 0, 4) == bytes([63]) * (4 * SLOT)
