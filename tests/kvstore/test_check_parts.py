"""What a CHECK server remembers, and when a client tries again."""

import pytest

from deepinfer_kvstore import conversations as conversations_module
from deepinfer_kvstore import tickets as tickets_module
from deepinfer_kvstore.conversations import Conversations
from deepinfer_kvstore.patience import Patience
from deepinfer_kvstore.rate import MAX_PEERS, RateLimit
from deepinfer_kvstore.tickets import Tickets


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def hashes(*letters: bytes) -> bytes:
    return b"".join(letter * 32 for letter in letters)


def test_conversations_go_on_from_their_last_hash() -> None:
    kept = Conversations(10_000)
    assert kept.keep("n", hashes(b"a", b"b")) == b"b" * 32
    assert kept.get("n", b"b" * 32) == hashes(b"a", b"b")
    assert kept.get("other", b"b" * 32) is None and kept.get("n", b"a" * 32) is None
    kept.keep("n", hashes(b"a", b"b", b"c"), before=b"b" * 32)
    assert kept.get("n", b"b" * 32) is None and kept.get("n", b"c" * 32) == hashes(b"a", b"b", b"c")
    assert kept.bytes == 96
    assert kept.keep("n", b"", before=b"c" * 32) == b"" and kept.bytes == 0


def test_conversations_are_bounded_and_the_last_used_stay() -> None:
    kept = Conversations(3 * 32)
    for letter in (b"a", b"b", b"c"):
        kept.keep("n", hashes(letter))
    kept.get("n", b"a" * 32)
    kept.keep("n", hashes(b"d"))
    assert [bool(kept.get("n", letter * 32)) for letter in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    kept.keep("n", hashes(b"x", b"x", b"x", b"y"))  # too long to keep at all
    assert kept.bytes == 96 and kept.get("n", b"y" * 32) is None


def test_short_conversations_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations_module, "MAX_CHAINS", 2)
    kept = Conversations(10_000)
    for letter in (b"a", b"b", b"c"):
        kept.keep("n", hashes(letter))
    assert [bool(kept.get("n", letter * 32)) for letter in (b"a", b"b", b"c")] == [False, True, True]
    assert kept.bytes == 64


def test_tickets_end_by_themselves_or_when_released() -> None:
    clock = Clock()
    tickets = Tickets(10_000, clock)
    keys = [bytes([number]) * 34 for number in range(3)]
    long, short = tickets.issue("n", keys, 60), tickets.issue("n", keys[:1], 10)
    found = tickets.get(long)
    assert found is not None and found.keys() == keys and found.namespace == "n" and found.deadline == 1060
    clock.now += 10
    assert tickets.get(short) is None and tickets.get(long) is not None
    tickets.release(long)
    tickets.release(long)
    assert tickets.get(long) is None and len(tickets) == 0
    assert len({tickets.issue("n", keys, 1) for _ in range(100)}) == 100


def test_tickets_are_bounded() -> None:
    tickets = Tickets(10 * 34, Clock())
    numbers = [tickets.issue("n", [b"k" * 34] * 3, 60) for _ in range(5)]
    assert [tickets.get(number) is not None for number in numbers] == [False, False, True, True, True]
    tickets.issue("n", [b"k" * 34] * 11, 60)
    assert len(tickets) == 0
    numbers = [tickets.issue("n", [], 60) for _ in range(tickets_module.MAX_TICKETS + 1)]
    assert len(tickets) == tickets_module.MAX_TICKETS and tickets.get(numbers[0]) is None


def test_a_peer_gets_its_rate_and_a_second_of_savings() -> None:
    clock = Clock()
    rate = RateLimit(10, clock)
    assert rate.allows("a", 6) and rate.allows("a", 4) and not rate.allows("a", 1)
    assert rate.allows("b", 10) and not rate.allows("b", 11)
    clock.now += 0.25
    assert not rate.allows("a", 3) and rate.allows("a", 2)
    clock.now += 100
    assert not rate.allows("a", 11) and rate.allows("a", 10)


def test_rate_of_forgotten_peers_and_of_too_many() -> None:
    rate = RateLimit(1, Clock())
    assert rate.allows("a", 1) and not rate.allows("a", 1)
    rate.forget("a")
    assert rate.allows("a", 1)
    for number in range(MAX_PEERS):
        rate.allows(number, 1)
    assert rate.allows("a", 1) and not rate.allows(MAX_PEERS - 1, 1)


def test_patience_grows_with_failures_and_has_an_end() -> None:
    clock = Clock()
    patience = Patience(clock)
    waits = []
    for _ in range(12):
        patience.failed()
        began = clock.now
        while not patience.over():
            clock.now += 1 / 64
        waits.append(clock.now - began)
    assert waits[0] == 0 and waits[1:5] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=1 / 64)
    assert waits == sorted(waits) and waits[-1] == 5
    patience.succeeded()
    patience.failed()
    assert patience.over()
