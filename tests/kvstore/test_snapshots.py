"""Snapshots in memory: exact payload or none, never more bytes than the capacity, newest of a sequence, minutes."""

import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deepinfer_kvstore.snapshot_directory import Holder, SnapshotDirectory
from deepinfer_kvstore.snapshots import (
    OVERHEAD_BYTES,
    SNAPSHOT_KEY_BYTES,
    SnapshotRing,
    digest_of,
    snapshot_key,
)

NAMESPACE = bytes(range(32))


def key_of(number: int, schema: int = 7) -> bytes:
    return snapshot_key(NAMESPACE, schema, number.to_bytes(32, "big"))


def room_for(count: int, payload_bytes: int) -> int:
    return count * (payload_bytes + OVERHEAD_BYTES)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_keys_tell_namespaces_schemas_and_positions_apart() -> None:
    keys = {key_of(1), key_of(2), key_of(1, 8), snapshot_key(bytes(32), 7, (1).to_bytes(32, "big"))}
    assert len(keys) == 4 and {len(key) for key in keys} == {SNAPSHOT_KEY_BYTES}
    with pytest.raises(ValueError, match=r"31 bytes, needs 32"):
        snapshot_key(bytes(31), 7, bytes(32))


@given(st.binary(min_size=1, max_size=100), st.integers(0, 799), st.booleans())
def test_digest_notices_every_bit_of_payload_and_key(payload: bytes, bit: int, keyed: bool) -> None:
    secret = bytes(32) if keyed else None
    flipped = bytearray(payload)
    flipped[bit // 8 % len(payload)] ^= 1 << bit % 8
    right = digest_of(key_of(1), payload, secret)
    assert len(right) == 16
    assert digest_of(key_of(1), bytes(flipped), secret) != right != digest_of(key_of(2), payload, secret)
    assert digest_of(key_of(1), payload, b"x" * 32) != right


def test_off_by_default() -> None:
    ring = SnapshotRing()
    assert not ring.put(key_of(1), b"", b"s")
    assert ring.get(key_of(1)) is None and key_of(1) not in ring
    assert ring.stats().counts == {"too_large": 1, "absent": 1}


def test_least_recently_used_goes_first() -> None:
    ring = SnapshotRing(room_for(3, 100))
    for number in range(3):
        assert ring.put(key_of(number), bytes([number]) * 100, b"%d" % number)
    assert ring.get(key_of(0)) == bytes(100)
    assert ring.put(key_of(3), bytes(100), b"3")
    assert [key_of(number) in ring for number in range(4)] == [True, False, True, True]
    assert ring.stats().counts["evicted"] == 1


def test_sequence_keeps_its_newest_and_passes_its_name_on() -> None:
    ring = SnapshotRing(room_for(10, 8), per_sequence=2)
    ring.put(key_of(100), bytes(8), b"other")
    for turn in range(5):
        assert ring.put(key_of(turn), bytes(8), ring.sequence_of(key_of(turn - 1)) or b"first" if turn else b"first")
    assert [key_of(turn) in ring for turn in range(5)] == [False, False, False, True, True]
    assert key_of(100) in ring
    assert ring.sequence_of(key_of(4)) == b"first" and ring.sequence_of(key_of(0)) is None
    assert ring.stats().counts["superseded"] == 3


def test_expiry_slides_with_use() -> None:
    clock = Clock()
    ring = SnapshotRing(room_for(2, 8), expiry_seconds=60, clock=clock)
    ring.put(key_of(1), b"12345678", b"a")
    clock.now += 59
    assert ring.get(key_of(1)) == b"12345678"
    clock.now += 59
    assert ring.describe(key_of(1)) == (8, digest_of(key_of(1), b"12345678"), 1.0)
    clock.now += 1
    assert ring.get(key_of(1)) is None and ring.describe(key_of(1)) is None
    assert ring.stats().used_bytes == 0
    assert ring.stats().counts["expired"] == 1


def test_payload_that_changed_in_memory_is_refused_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = SnapshotRing(room_for(1, 8))
    ring.put(key_of(1), bytes(8), b"a")
    ring._held[key_of(1)].payload = b"\0\0\0\0\0\0\0\x01"
    assert ring.get(key_of(1)) is None
    assert ring.stats().counts["corrupt"] == 1 and ring.stats().used_bytes == 0


def test_ring_keeps_a_copy() -> None:
    ring, source = SnapshotRing(room_for(1, 8)), bytearray(8)
    ring.put(key_of(1), memoryview(source), b"a")
    source[0] = 1
    assert ring.get(key_of(1)) == bytes(8)


class RingAgainstDict(RuleBasedStateMachine):
    """What was put last under a key is what is read, or nothing is."""

    CAPACITY = room_for(4, 50)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ring = SnapshotRing(self.CAPACITY, per_sequence=2, expiry_seconds=100, clock=self.clock)
        self.put: dict[int, bytes] = {}

    @rule(number=st.integers(0, 9), size=st.integers(0, 6000), sequence=st.integers(0, 3))
    def store(self, number: int, size: int, sequence: int) -> None:
        payload = bytes([number]) * size if key_of(number) not in self.ring else self.put[number]
        held = self.ring.put(key_of(number), payload, bytes([sequence]))
        assert held == (len(payload) + OVERHEAD_BYTES <= self.CAPACITY)
        if held:
            self.put[number] = payload
            assert key_of(number) in self.ring

    @rule(number=st.integers(0, 9))
    def load(self, number: int) -> None:
        found = self.ring.get(key_of(number))
        assert found is None or found == self.put[number]

    @rule(seconds=st.integers(1, 80))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def bounded(self) -> None:
        held = self.ring._held
        assert self.ring.stats().used_bytes == sum(h.charged_bytes for h in held.values()) <= self.CAPACITY
        assert all(len(h.payload or b"") + OVERHEAD_BYTES == h.charged_bytes for h in held.values())
        of_sequence = [h.sequence for h in held.values()]
        assert all(of_sequence.count(sequence) <= 2 for sequence in of_sequence)


TestRingAgainstDict = RingAgainstDict.TestCase
TestRingAgainstDict.settings = settings(max_examples=60, stateful_step_count=40)


def run_together(threads: int, work: Callable[[int], None]) -> None:
    """Run work(0), work(1), … at once; raises what one of them raised."""
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    if failed:
        raise failed[0]


def test_byte_bound_and_exact_payloads_under_concurrency() -> None:
    capacity = room_for(5, 2000)
    ring = SnapshotRing(capacity, per_sequence=3)

    def work(thread: int) -> None:
        drawn = random.Random(thread)
        for _ in range(300):
            number = drawn.randrange(20)
            payload = bytes([number]) * (1000 + 100 * number)
            if drawn.random() < 0.5:
                ring.put(key_of(number), payload, bytes([number % 4]))
            else:
                assert ring.get(key_of(number)) in (None, payload)
            assert ring.stats().used_bytes <= capacity

    run_together(6, work)
    stats = ring.stats()
    assert stats.used_bytes == sum(held.charged_bytes for held in ring._held.values())
    assert stats.counts["hit"] > 0 and stats.counts["corrupt"] == 0


def holder(address: str, seconds: float = 60) -> Holder:
    return Holder(address, 8, bytes(16), seconds)


def test_directory_names_the_first_key_that_is_held() -> None:
    clock = Clock()
    directory = SnapshotDirectory(clock=clock)
    directory.announce(key_of(1), holder("a:1"))
    directory.announce(key_of(2), holder("b:1", 30))
    clock.now += 20
    assert directory.locate([key_of(3), key_of(2), key_of(1)]) == (1, holder("b:1", 10))
    clock.now += 10
    assert directory.locate([key_of(3), key_of(2), key_of(1)]) == (2, holder("a:1", 30))
    assert len(directory) == 1
    assert directory.locate([]) is None


def test_directory_forgets_what_its_holder_lost_and_no_other() -> None:
    directory = SnapshotDirectory()
    directory.announce(key_of(1), holder("a:1"))
    directory.announce(key_of(1), holder("b:1"))
    directory.withdraw(key_of(1), "a:1")
    found = directory.locate([key_of(1)])
    assert found is not None and found[1].address == "b:1"
    directory.withdraw(key_of(1), "b:1")
    assert directory.locate([key_of(1)]) is None


def test_directory_is_bounded() -> None:
    directory = SnapshotDirectory(capacity=3)
    for number in range(5):
        directory.announce(key_of(number), holder("a:1"))
    assert len(directory) == 3
    assert [directory.locate([key_of(n)]) is not None for n in range(5)] == [False, False, True, True, True]
