"""Classes of time to live and watermarks."""

from pathlib import Path

import pytest

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.fill import MEASURE_SECONDS, Disk, Disks, Fill
from deepinfer_kvstore.retention import DAY, NEVER, Retention, parse_ttl, ttl_number, ttl_seconds


def test_known_classes_live_exactly_as_long_as_promised() -> None:
    retention = Retention()
    assert ttl_seconds(retention.number("agent")) == 3 * DAY
    assert ttl_seconds(retention.number("chat")) == 7 * DAY
    assert ttl_seconds(retention.number("none")) is None
    assert ttl_seconds(0) == 3 * DAY


def test_every_number_has_one_time_and_longer_times_have_larger_numbers() -> None:
    times = [ttl_seconds(number) for number in range(1, NEVER)]
    assert times == sorted(set(times), key=lambda seconds: seconds or 0)
    assert [ttl_number(seconds) for seconds in times] == list(range(1, NEVER))
    assert ttl_seconds(NEVER) is None and ttl_number(None) == NEVER


@pytest.mark.parametrize(
    ("asked", "kept"), [(1, 1), (59, 59), (61, 120), (3601, 7200), (47 * 3600, 47 * 3600), (2 * DAY + 1, 3 * DAY)]
)
def test_a_time_between_two_numbers_is_kept_for_the_longer(asked: int, kept: int) -> None:
    assert ttl_seconds(ttl_number(asked)) == kept


@pytest.mark.parametrize("seconds", [0, -1, 90 * DAY + 1])
def test_times_out_of_range_are_refused(seconds: int) -> None:
    with pytest.raises(StoreConfigError, match="1s to 90d"):
        ttl_number(seconds)


def test_classes_from_a_command_line() -> None:
    classes = parse_ttl("agent=1h, chat=14d,batch=90s,keep=none,soon=5m")
    assert classes == {"agent": 3600, "chat": 14 * DAY, "batch": 90, "keep": None, "soon": 300}
    retention = Retention(ttl=classes, default_class="batch")
    assert ttl_seconds(retention.number("agent")) == 3600
    assert ttl_seconds(retention.number("batch")) == 120
    assert retention.number("keep") == NEVER
    assert Retention(ttl="batch=90s").numbers["batch"] == retention.numbers["batch"]
    assert "none" in retention.numbers and "agents" not in retention.numbers


@pytest.mark.parametrize(
    "text", ["", "agent", "agent=", "agent=3", "agent=3w", "agent=-1d", "=3d", "agent=3d,,chat=1d"]
)
def test_other_forms_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(StoreConfigError, match="agent=3d"):
        parse_ttl(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"low": 0.9}, "low 0.9"),
        ({"high": 0.99}, "high 0.99"),
        ({"hard": 0.99}, "hard 0.99"),
        ({"low": 0.0}, "low 0.0"),
        ({"low": float("nan")}, "low nan"),
        ({"expired_per_hour": 0.0}, "expired_per_hour is 0.0"),
        ({"reclaim": "shred"}, "'shred'"),
        ({"default_class": "chats"}, "'chats'"),
        ({"ttl": {"agent": 0}}, "time to live of 0 s"),
        ({"ttl": "agent=3"}, "'agent=3'"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_at_once(options: dict[str, object], said: str) -> None:
    with pytest.raises(StoreConfigError, match=said):
        Retention(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("used", "disk_used", "surplus"),
    [
        (850, 0, 0),
        (851, 0, 51),
        (1200, 0, 400),
        (100, 95_000, 0),
        (100, 96_000, 60),
        (20, 99_000, 20),
        (900, 95_001, 100),
    ],
)
def test_space_is_made_above_the_high_mark_down_to_the_low_one(used: int, disk_used: int, surplus: int) -> None:
    """Of 1000 slots of 100 bytes, on a file system of 100,000 bytes."""
    fill = Fill(100, used, 1000, Disk(100_000, disk_used))
    assert Retention().surplus_blocks(fill) == surplus


@pytest.mark.parametrize(("used", "disk_used", "full"), [(949, 95_000, False), (950, 0, True), (0, 95_001, True)])
def test_nothing_is_stored_above_the_hard_mark(used: int, disk_used: int, full: bool) -> None:
    assert Retention().is_full(Fill(100, used, 1000, Disk(100_000, disk_used))) == full


def test_a_disk_that_others_filled_to_the_high_mark_leaves_the_store_alone() -> None:
    """A store of a hundredth of a disk must not vanish for what the rest of the disk is used for."""
    retention, disk = Retention(), Disk(100_000, 90_000)
    assert retention.surplus_blocks(Fill(100, 10, 20, disk)) == 0
    assert not retention.presses(disk) and retention.room_bytes(disk) == 5_000
    assert retention.presses(Disk(100_000, 95_001)) and retention.room_bytes(Disk(100_000, 95_001)) == -1
    assert not retention.presses(Disk()) and retention.room_bytes(Disk()) == float("inf")


def test_slots_that_can_be_written_again_do_not_fill_the_disk() -> None:
    """Slabs are reserved whole: an empty one takes space, but no collection could make it emptier."""
    disk = Disk(total_bytes=100_000, used_bytes=90_000, own_bytes=40_000)
    assert Fill(100, 400, 1000, disk).disk_used_bytes == 90_000
    assert Fill(100, 100, 1000, disk).disk_used_bytes == 60_000
    assert Fill(100, 500, 1000, disk).disk_used_bytes == 90_000


def test_the_fullest_disk_is_measured_and_then_remembered(tmp_path: Path) -> None:
    now = 0.0
    disks = Disks([tmp_path / "gone", tmp_path], clock=lambda: now)
    (tmp_path / "a.slab").write_bytes(bytes(1 << 20))
    first = disks.fullest()
    assert 1 << 20 <= first.own_bytes <= first.used_bytes < first.total_bytes
    (tmp_path / "a.slab").unlink()
    assert disks.fullest() == first
    now = MEASURE_SECONDS
    assert disks.fullest().own_bytes == 0
    assert Disks([tmp_path / "gone"]).fullest() == Disks([]).fullest() == Disk()
