"""Collection of a namespace: what is deleted, when, and by whom."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from blocks import NAMESPACE

from deepinfer_kvstore import gc
from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.fill import Disk, Fill
from deepinfer_kvstore.gc import Collector, purge
from deepinfer_kvstore.gc_lease import GcLease
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.pace import Pace
from deepinfer_kvstore.record import Op, Record
from deepinfer_kvstore.retention import DAY, NEVER, Retention, ttl_number

START_S = 1_800_000_000
HOUR = 3600
SLOT_BYTES = 4096


class Namespace:
    """Journals, an index and a collector over them, with clocks that are set by hand."""

    def __init__(self, directory: Path, capacity_blocks: int, retention: Retention | None = None) -> None:
        (directory / "journals").mkdir(exist_ok=True)
        self.directory = directory
        self.wall_s = float(START_S)
        self.monotonic_s = 100.0
        self.capacity_blocks = capacity_blocks
        self.disk_bytes = 1 << 40
        self.others_bytes = 0
        self.index = Index.open(directory / "index", NAMESPACE)
        self.journals = JournalSet([directory / "journals"], NAMESPACE)
        self.writer = JournalWriter([directory / "journals"], 1, 1, NAMESPACE)
        self.own = JournalWriter([directory / "journals"], 2, 1, NAMESPACE)
        self.lease = GcLease(directory, 3600)
        self.stored = 0
        self.collector = Collector(
            self.index,
            self.lease,
            retention or Retention(),
            append=self.own.append,
            sync=self.sync,
            fill=self.fill,
            lease_s=3600,
            pace=Pace(),
            clock=lambda: self.monotonic_s,
            wall=lambda: self.wall_s,
        )

    def sync(self) -> None:
        self.index.sync(self.journals)

    def fill(self) -> Fill:
        used = self.index.totals().slots
        disk = Disk(self.disk_bytes, self.others_bytes + used * SLOT_BYTES, used * SLOT_BYTES)
        return Fill(SLOT_BYTES, used, self.capacity_blocks, disk)

    def pass_time(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds

    def put(self, names: Sequence[str], ttl_class: int = NEVER, tenant: int = 0, after: Key | None = None) -> list[Key]:
        """A chain of blocks stored now."""
        keys, records = [], []
        before = None if after is None else self.index.get(after)
        depth = before.depth + 64 if before else 64
        for name in names:
            found = make_key(1, hashlib.sha256(name.encode()).digest())
            now = int(self.wall_s * 1000)
            entry = Entry(
                Location(1, 0, self.stored, self.stored + 1),
                100,
                bytes(8) if after is None else after[2:10],
                depth,
                now,
                now,
                ttl_class,
                tenant,
            )
            records.append(Record(Op.PUT, found, entry))
            keys.append(found)
            after, depth, self.stored = found, depth + 64, self.stored + 1
        self.writer.append(records)
        self.sync()
        return keys

    def touch(self, key: Key, ahead_s: float = 0.0) -> None:
        """Use a block now, or pin it for `ahead_s` seconds."""
        entry = self.index.get(key)
        assert entry is not None
        used = entry._replace(touched_ms=int((self.wall_s + ahead_s) * 1000))
        self.writer.append([Record(Op.TOUCH, key, used)])

    def held(self, keys: Sequence[Key]) -> list[bool]:
        self.sync()
        return self.index.contains(keys)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Namespace]:
    return lambda capacity_blocks, retention=None: Namespace(tmp_path, capacity_blocks, retention)


Make = Callable[..., Namespace]


def test_nothing_goes_below_the_high_mark_and_above_it_the_oldest_down_to_the_low_one(make: Make) -> None:
    space = make(100)
    old = [space.put([f"old-{number}"])[0] for number in range(40)]
    space.pass_time(10)
    new = [space.put([f"new-{number}"])[0] for number in range(45)]
    assert space.collector.step().evicted == {}
    space.pass_time(10)
    new += space.put(["one more"])
    collected = space.collector.step()
    assert collected.leads and collected.evicted == {"space": 6} and collected.scanned == 86
    assert space.index.totals().keys == 80
    assert sum(space.held(old)) == 34 and all(space.held(new))
    assert space.collector.step().evicted == {}


def test_expired_blocks_go_before_older_ones_that_live_longer(make: Make) -> None:
    space = make(10, Retention(expired_per_hour=1000))
    keep = space.put(["keep"])
    chat = space.put(["chat"], ttl_number(7 * DAY))
    space.pass_time(DAY)
    agent = space.put(["agent"], ttl_number(3 * DAY))
    space.pass_time(3 * DAY + 1)
    assert space.collector.step().evicted == {"expired": 1}
    assert space.held([*keep, *chat, *agent]) == [True, True, False]
    space.pass_time(3 * DAY)
    assert space.collector.step().evicted == {"expired": 1}
    assert space.held([*keep, *chat]) == [True, False]


def test_time_to_live_slides_with_each_use(make: Make) -> None:
    space = make(100, Retention(expired_per_hour=1000))
    keys = space.put(["first", "second", "third"], ttl_number(3 * DAY))
    space.pass_time(2 * DAY)
    space.touch(keys[1])
    space.pass_time(2 * DAY)
    assert space.collector.step().evicted == {"expired": 1}
    assert space.held(keys) == [True, True, False]


def test_a_scan_for_expired_blocks_alone_is_not_made_at_every_step(make: Make) -> None:
    space = make(100, Retention(expired_per_hour=1000))
    space.put(["block"], ttl_number(90))
    assert space.collector.step().scanned == 1
    space.pass_time(gc.SCAN_PAUSE_SECONDS - 1)
    assert space.collector.step().scanned == 0
    space.pass_time(2)
    assert space.collector.step().scanned == 1


@pytest.mark.parametrize("jump_s", [365 * DAY, -365 * DAY])
def test_a_clock_that_jumps_a_year_does_not_empty_the_store(make: Make, jump_s: float) -> None:
    """Either all blocks look expired, or all look used in a future that cannot be. A day is left to notice it."""
    space = make(2400)
    for number in range(1920):
        space.put([f"block-{number}"], ttl_number(3 * DAY))
        space.wall_s += 0.001
    space.wall_s += jump_s
    left = []
    for _ in range(24):
        for _ in range(30):
            space.pass_time(HOUR / 30)
            space.collector.step()
        left.append(space.index.totals().keys)
    assert left[0] >= 1920 - 2400 / 24 - 2
    assert left[11] > 1920 * 0.35
    assert left[-1] == 0  # nor does it keep them for ever


def test_after_a_jump_forward_space_is_still_made_from_the_least_recently_used(make: Make) -> None:
    space = make(100)
    old = [space.put([f"old-{number}"], ttl_number(3 * DAY))[0] for number in range(40)]
    space.pass_time(60)
    new = [space.put([f"new-{number}"], ttl_number(3 * DAY))[0] for number in range(46)]
    space.wall_s += 365 * DAY
    assert space.collector.step().evicted == {"expired": 6}
    assert sum(space.held(old)) == 34 and all(space.held(new))


def test_blocks_of_a_time_that_was_wrong_go_first_once_the_clock_is_right(make: Make) -> None:
    space = make(100)
    right = [space.put([f"right-{number}"])[0] for number in range(40)]
    space.wall_s += 365 * DAY
    wrong = [space.put([f"wrong-{number}"])[0] for number in range(46)]
    space.wall_s -= 365 * DAY
    assert space.collector.step().evicted == {"clock": 6}
    assert sum(space.held(wrong)) == 40 and all(space.held(right))


def test_a_pinned_block_stays_with_all_before_it_until_its_time_is_over(make: Make) -> None:
    """LMCache#1690: a lookup said that they are there."""
    space = make(10)
    keys = space.put([f"block-{number}" for number in range(9)])
    space.touch(keys[6], ahead_s=60)
    assert space.collector.step().evicted == {"space": 1}
    assert space.held(keys) == [True] * 8 + [False]
    space.put(["other"])
    space.capacity_blocks = 6
    assert space.collector.step().evicted == {"space": 2}  # all that may go
    assert space.held(keys) == [True] * 7 + [False] * 2
    space.pass_time(61)
    assert space.collector.step().evicted == {"space": 3}
    assert space.held(keys) == [True] * 4 + [False] * 5


def test_a_block_used_after_the_choice_stays_with_all_before_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    space = make(10)
    keys = space.put([f"block-{number}" for number in range(9)])
    other = space.put(["other"])
    chosen = gc.Forest.evictions

    def use_then(forest: gc.Forest, blocks: int, expired: int, own: int) -> list[gc.Eviction]:
        gone = chosen(forest, blocks, expired, own)
        space.pass_time(1)
        space.touch(keys[5])
        space.sync()
        return gone

    monkeypatch.setattr(gc.Forest, "evictions", use_then)
    space.capacity_blocks = 1
    space.collector.step()
    assert space.held(keys) == [True] * 6 + [False] * 3 and space.held(other) == [False]


def test_only_the_holder_of_the_lease_collects_and_stops_when_it_is_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = make(10)
    keys = space.put([f"block-{number}" for number in range(10)])
    other = GcLease(space.directory, 3600)
    assert other.hold()
    assert space.collector.step() == gc.Collected()
    assert all(space.held(keys))
    other.release()
    monkeypatch.setattr(gc, "DELETE_BLOCKS", 1)
    asked = iter([True, True, False])
    monkeypatch.setattr(space.lease, "hold", lambda: next(asked))
    monkeypatch.setattr(space.collector, "_lease_s", 0.0)
    space.collector.step()  # at its beginning, while it scans, before the first deletion
    assert all(space.held(keys))


def test_two_collectors_at_once_delete_blocks_twice_and_nothing_else(make: Make) -> None:
    space = make(10)
    keys = space.put([f"block-{number}" for number in range(9)])
    gone = space.index.entries(None, 10)
    by_depth = sorted(gone, key=lambda found: -found[1].depth)
    deletions = [Record(Op.DELETE, key, entry) for key, entry in by_depth[:1]]
    other = JournalWriter([space.directory / "journals"], 3, 1, NAMESPACE)
    other.append(deletions)
    space.own.append(deletions)
    again = space.put(["block-8"], after=keys[7])  # its slot is another one now
    assert again == keys[8:]
    other.append(deletions)
    assert all(space.held(keys))


def test_a_journal_that_cannot_be_written_is_an_error_and_nothing_is_lost(make: Make) -> None:
    space = make(10)
    keys = space.put([f"block-{number}" for number in range(10)])
    space.own.close()
    with pytest.raises(OSError):
        space.collector.step()
    assert all(space.held(keys))


def test_a_full_disk_is_relieved_though_the_store_is_below_its_capacity(make: Make) -> None:
    """Tanguille/cluster#4636: a cache that fills a node's disk takes the node with it."""
    space = make(1000)
    space.put([f"block-{number}" for number in range(100)])
    space.others_bytes = 880 * SLOT_BYTES
    space.disk_bytes = 1000 * SLOT_BYTES
    assert space.collector.step().evicted == {"space": 30 + 50}  # above the hard mark, and 5 % of the capacity
    assert space.collector.step().evicted == {}


def test_purging_a_tenant_takes_its_blocks_and_all_that_continue_them(make: Make) -> None:
    space = make(100)
    shared = space.put(["shared"], tenant=7)
    mine = space.put(["mine-1", "mine-2"], tenant=8, after=shared[0])
    after_mine = space.put(["theirs"], tenant=7, after=mine[0])
    other = space.put(["other"], tenant=9)
    space.touch(mine[1], ahead_s=60)
    gone = purge(space.index, append=space.own.append, sync=space.sync, match=lambda key, entry: entry.tenant == 8)
    assert gone == 3
    assert space.held([*shared, *mine, *after_mine, *other]) == [True, False, False, False, True]


def test_purging_reaches_the_copies_of_other_writers(make: Make) -> None:
    space = make(100)
    keys = space.put(["block"], tenant=8)
    entry = space.index.get(keys[0])
    assert entry is not None
    copy = entry._replace(location=Location(3, 0, 5, 9), created_ms=entry.created_ms + 1)
    JournalWriter([space.directory / "journals"], 3, 1, NAMESPACE).append([Record(Op.PUT, keys[0], copy)])
    space.sync()
    assert space.index.totals().slots == 2
    gone = purge(space.index, append=space.own.append, sync=space.sync, match=lambda key, entry: entry.tenant == 8)
    assert gone == 2 and space.held(keys) == [False]
    assert space.index.totals().slots == 0


def test_what_has_to_go_for_space_does_not_use_up_the_ration_of_later_hours(make: Make) -> None:
    space = make(100)
    for number in range(90):
        space.put([f"old-{number}"], ttl_number(3 * DAY))
    space.pass_time(4 * DAY)
    assert space.collector.step().evicted == {"expired": 10}
    space.pass_time(HOUR)
    assert space.collector.step().evicted == {"expired": 4}  # 1/24 of 100


def test_a_writer_in_need_is_helped_without_the_lease_and_below_every_mark(make: Make) -> None:
    space = make(1000)
    old = space.put(["old-1", "old-2"])
    space.pass_time(1)
    other = space.put(["other"])
    assert GcLease(space.directory, 3600).hold()
    assert space.collector.step() == gc.Collected()
    space.collector._need = lambda: gc.Need([1], 1)
    assert space.collector.step().evicted == {"space": 1}
    assert space.held([*old, *other]) == [True, False, True]
    space.collector._need = lambda: gc.Need([99], 2)  # one that owns nothing yet
    assert space.collector.step().evicted == {"space": 2}
