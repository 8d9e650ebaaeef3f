"""Classes of time to live and watermarks."""

from pathlib import Path

import pytest

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.fill import Fill
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
        (100, 85_000, 0),
        (100, 86_000, 60),
        (20, 99_000, 20),
        (900, 81_000, 100),
    ],
)
def test_space_is_made_above_the_high_mark_down_to_the_low_one(used: int, disk_used: int, surplus: int) -> None:
    """Of 1000 slots of 100 bytes, on a file system of 100,000 bytes."""
    fill = Fill(100, used, 1000, 100_000, disk_used)
    assert Retention().surplus_blocks(fill) == surplus


def test_the_fill_of_a_directory_leaves_out_what_can_be_written_again(tmp_path: Path) -> None:
    """Slabs are reserved whole: an empty one fills the disk, but no collection could make it emptier."""
    (tmp_path / "a.slab").write_bytes(bytes(1 << 20))
    full = Fill.measure([tmp_path], 4096, 256, 1 << 21)
    half = Fill.measure([tmp_path], 4096, 128, 1 << 21)
    assert (full.capacity_blocks, full.used_blocks) == (512, 256)
    assert full.disk_bytes > full.disk_used_bytes > 1 << 20
    assert abs((full.disk_used_bytes - half.disk_used_bytes) - (1 << 19)) < 1 << 28  # others write to the disk too
    assert Fill.measure([tmp_path / "gone"], 4096, 1, 4096) == Fill(4096, 1, 1)
