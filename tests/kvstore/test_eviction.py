"""The order of eviction, against a heap of leaves that is searched from end to end each time."""

import hashlib
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.eviction import PIN_LIMIT_MS, SHORT_KEY_BYTES, Eviction, Forest
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.pace import Pace
from deepinfer_kvstore.retention import NEVER, ttl_number

NOW = 1_800_000_000_000
AGENT, CHAT = ttl_number(3 * 86400), ttl_number(7 * 86400)
DAY_MS = 86_400_000

Blocks = dict[Key, Entry]


def block(
    name: str, parent: Key | None, depth: int, used_ms: int, ttl_class: int = NEVER, schema: int = 1
) -> tuple[Key, Entry]:
    """A block whose hash is that of its name."""
    before = bytes(8) if parent is None else parent[2:SHORT_KEY_BYTES]
    key = make_key(schema, hashlib.sha256(name.encode()).digest())
    return key, Entry(Location(1, 0, 0, 1), 100, before, depth, used_ms, used_ms, ttl_class, 0)


def forest_of(blocks: Blocks, pace: float = 1.0) -> Forest:
    forest = Forest(NOW, Pace(pace))
    for key, entry in sorted(blocks.items()):
        forest.add(key, entry)
    return forest


def evict(blocks: Blocks, count: int, expired: int = 0) -> list[Eviction]:
    return forest_of(blocks).evictions(count, expired)


def heap_of_leaves(blocks: Blocks) -> list[bytes]:
    """Short keys in the order of eviction: of all blocks with none after them, the one to go first, until none may."""
    left, order = dict(blocks), []

    def is_parent(key: Key, entry: Entry) -> bool:
        return any(
            other[:2] == key[:2] and found.parent == key[2:SHORT_KEY_BYTES] and found.depth > entry.depth
            for other, found in left.items()
        )

    def rank(key: Key) -> tuple[bool, bool, int, int]:
        entry = left[key]
        impossible = entry.touched_ms > NOW + PIN_LIMIT_MS
        days = {AGENT: 3, CHAT: 7}.get(entry.ttl_class, 10**6)
        alive = not impossible and entry.touched_ms + days * DAY_MS >= NOW
        return alive, not impossible, entry.touched_ms, -entry.depth

    while True:
        leaves = [
            key
            for key, entry in left.items()
            if not NOW < entry.touched_ms <= NOW + PIN_LIMIT_MS and not is_parent(key, entry)
        ]
        if not leaves:
            return order
        first = min(leaves, key=rank)
        del left[first]
        order.append(first[:SHORT_KEY_BYTES])


def random_blocks(seed: int, count: int, pins: float = 0.05, wrong: float = 0.05) -> Blocks:
    """Trees of prefixes with unique times of use, in an order that owes nothing to the trees; two schemas."""
    random = Random(seed)
    times = random.sample(range(NOW - 10 * DAY_MS, NOW), count)
    blocks: Blocks = {}
    for number, used in enumerate(times):
        schema = random.choice((1, 2))
        same = [key for key in blocks if key[:2] == schema.to_bytes(2, "big")]
        parent = random.choice(same) if same and random.random() < 0.8 else None
        depth = blocks[parent].depth + 64 if parent else 64
        shift = random.random()
        if shift < pins:
            used = NOW + random.randrange(1, PIN_LIMIT_MS)
        elif shift < pins + wrong:
            used += 400 * DAY_MS
        key, entry = block(f"{seed}-{number}", parent, depth, used, random.choice((AGENT, CHAT, NEVER)), schema)
        blocks[key] = entry
    return blocks


@given(seed=st.integers(0, 2**32), count=st.integers(0, 60))
def test_the_order_is_that_of_a_heap_of_leaves(seed: int, count: int) -> None:
    blocks = random_blocks(seed, count)
    assert [short for short, _, _ in evict(blocks, count)] == heap_of_leaves(blocks)


@given(seed=st.integers(0, 2**32), evicted=st.integers(0, 60))
def test_what_stays_is_whole_prefixes_however_many_go(seed: int, evicted: int) -> None:
    blocks = random_blocks(seed, 60)
    gone = {short for short, _, _ in evict(blocks, evicted)}
    left = {key[:SHORT_KEY_BYTES]: entry for key, entry in blocks.items() if key[:SHORT_KEY_BYTES] not in gone}
    assert len(left) == len(blocks) - len(gone)
    for short, entry in left.items():
        assert entry.parent == bytes(8) or short[:2] + entry.parent in left


def test_a_chain_goes_from_its_end_though_its_first_blocks_are_older() -> None:
    """Prefill stores a prompt from its start: its first blocks are the least recently used of all."""
    blocks: Blocks = {}
    parent = None
    for number in range(10):
        parent, entry = block(f"long-{number}", parent, 64 * (number + 1), NOW - 1000 + number)
        blocks[parent] = entry
    other, entry = block("other", None, 64, NOW - 10)
    blocks[other] = entry
    chain = list(blocks)[:10]
    gone = evict(blocks, 4)
    assert [short for short, _, _ in gone] == [key[:SHORT_KEY_BYTES] for key in reversed(chain[6:])]
    assert {reason for _, _, reason in gone} == {"space"}


def test_a_hit_on_a_long_prompt_keeps_every_block_before_it() -> None:
    first, a = block("first", None, 64, NOW - 9 * DAY_MS, AGENT)
    second, b = block("second", first, 128, NOW - 9 * DAY_MS, AGENT)
    third, c = block("third", second, 192, NOW - 1, AGENT)
    aside, d = block("aside", first, 128, NOW - 9 * DAY_MS, AGENT)
    assert evict({first: a, second: b, third: c, aside: d}, 0, 10) == [
        Eviction(aside[:SHORT_KEY_BYTES], NOW - 9 * DAY_MS, "expired")
    ]


def test_the_expired_go_first_and_no_more_than_may() -> None:
    blocks = dict(
        [
            *(block(f"agent-{number}", None, 64, NOW - 4 * DAY_MS - number, AGENT) for number in range(10)),
            *(block(f"chat-{number}", None, 64, NOW - 5 * DAY_MS - number, CHAT) for number in range(10)),
        ]
    )
    assert evict(blocks, 0, 0) == []
    assert Counter(reason for _, _, reason in evict(blocks, 0, 4)) == {"expired": 4}
    assert Counter(reason for _, _, reason in evict(blocks, 0, 100)) == {"expired": 10}
    assert Counter(reason for _, _, reason in evict(blocks, 3, 2)) == {"expired": 3}
    assert Counter(reason for _, _, reason in evict(blocks, 13, 4)) == {"expired": 10, "space": 3}


@pytest.mark.parametrize(("ahead_ms", "goes"), [(1, False), (PIN_LIMIT_MS, False), (PIN_LIMIT_MS + 1, True)])
def test_a_use_in_the_future_is_a_pin_up_to_an_hour(ahead_ms: int, goes: bool) -> None:
    """LMCache#1690: what a lookup promised is there when it is read."""
    first, a = block("first", None, 64, NOW - 9 * DAY_MS, AGENT)
    second, b = block("second", first, 128, NOW + ahead_ms, AGENT)
    gone = evict({first: a, second: b}, 2, 2)
    assert [(short, reason) for short, _, reason in gone] == (
        [(second[:SHORT_KEY_BYTES], "clock"), (first[:SHORT_KEY_BYTES], "expired")] if goes else []
    )


def test_blocks_whose_hashes_agree_in_eight_bytes_keep_both_parents() -> None:
    """Finding two such takes 2^32 hashes: an attack, not an accident. Neither prefix may lose its first block."""
    first, a = block("first", None, 64, NOW - 100)
    twin = first[:SHORT_KEY_BYTES] + bytes(24)
    child, c = block("child", first, 128, NOW)
    gone = evict({first: a, twin: a, child: c}, 1)
    assert [short for short, _, _ in gone] == [child[:SHORT_KEY_BYTES]]


def test_a_chain_that_names_itself_as_its_start_ends() -> None:
    """Entries come from journals that others write."""
    key, entry = block("loop", None, 64, NOW - 5)
    gone = evict({key: entry._replace(parent=key[2:SHORT_KEY_BYTES])}, 1)
    assert [short for short, _, _ in gone] == [key[:SHORT_KEY_BYTES]]


@pytest.mark.parametrize("touched_ms", [0, 2**63, 2**64 - 1])
def test_times_at_the_ends_of_their_range_are_ordered_like_others(touched_ms: int) -> None:
    key, entry = block("edge", None, 64, touched_ms, AGENT)
    later, other = block("later", None, 64, NOW - 1, AGENT)
    assert evict({key: entry, later: other}, 1)[0].short_key == key[:SHORT_KEY_BYTES]


def test_pauses_change_nothing_but_the_time_it_takes() -> None:
    blocks = random_blocks(7, 600)
    assert forest_of(blocks, 0.5).evictions(300, 300) == forest_of(blocks).evictions(300, 300)


@given(seed=st.integers(0, 2**32), tenant=st.integers(0, 2))
def test_blocks_are_chosen_with_all_after_them_from_the_end(seed: int, tenant: int) -> None:
    random = Random(seed)
    blocks = {key: entry._replace(tenant=random.randrange(3)) for key, entry in random_blocks(seed, 40).items()}

    def belongs(key: Key) -> bool:
        entry = blocks[key]
        before = [other for other in blocks if other[:2] == key[:2] and other[2:SHORT_KEY_BYTES] == entry.parent]
        return entry.tenant == tenant or any(belongs(other) for other in before)

    chosen = bytearray(entry.tenant == tenant for _, entry in sorted(blocks.items()))
    gone = forest_of(blocks).with_those_after(chosen, "purge")
    assert {short for short, _, _ in gone} == {key[:SHORT_KEY_BYTES] for key in blocks if belongs(key)}
    assert {reason for _, _, reason in gone} <= {"purge"}
    depths = {key[:SHORT_KEY_BYTES]: entry.depth for key, entry in blocks.items()}
    for schema in (b"\0\1", b"\0\2"):
        order = [depths[short] for short, _, _ in gone if short[:2] == schema]
        assert order == sorted(order, reverse=True)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 5), own=st.integers(1, 20))
def test_a_writer_in_need_gets_its_own_first_blocks_with_all_after_them(seed: int, count: int, own: int) -> None:
    random = Random(seed)
    blocks = {
        key: entry._replace(location=entry.location._replace(writer=random.choice((1, 2))))
        for key, entry in random_blocks(seed, 60).items()
    }
    order = heap_of_leaves(blocks)
    writers = {key[:SHORT_KEY_BYTES]: entry.location.writer for key, entry in blocks.items()}
    wanted = {*order[:count], *[short for short in order if writers[short] == 2][:own]}
    forest = Forest(NOW, Pace(), own=[2])
    for key, entry in sorted(blocks.items()):
        forest.add(key, entry)
    gone = [short for short, _, _ in forest.evictions(count, 0, own)]
    assert wanted <= set(gone) and len(set(gone)) == len(gone)
    last = max(map(order.index, wanted), default=-1)
    assert set(gone) <= set(order[: last + 1])  # those after them come earlier in the order
    left = {short for short in writers if short not in gone}
    assert all(
        entry.parent == bytes(8) or key[:2] + entry.parent in left
        for key, entry in blocks.items()
        if key[:SHORT_KEY_BYTES] in left
    )
