"""How long blocks are kept: classes of time to live, and watermarks of fill.

A block carries its time to live itself, as the byte `ttl_class` of its entry and header. The larger of two such numbers
lives longer, so "the longest-lived of its users" is a maximum, and processes that were given other classes, or other
times for them, agree on every block. New times hold for blocks stored or touched since.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from types import MappingProxyType
from typing import Literal

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.fill import Disk, Fill

MINUTE, HOUR, DAY = 60, 3600, 86400
NEVER = 255
"""The number of blocks that leave only for want of space."""

_LIFETIMES = (
    3 * DAY,  # 0: no class was told
    *range(1, MINUTE),
    *range(MINUTE, HOUR, MINUTE),
    *range(HOUR, 2 * DAY, HOUR),
    *range(2 * DAY, 91 * DAY, DAY),
)  # 255 of them, increasing from 1 on
_UNITS = {"s": 1, "m": MINUTE, "h": HOUR, "d": DAY}


def ttl_number(seconds: int | None) -> int:
    """The number for a time to live; the next longer one that there is: seconds, minutes, hours, then days.

    Raises:
        StoreConfigError: not 1 second to 90 days. None is no limit.
    """
    if seconds is None:
        return NEVER
    if not 1 <= seconds <= _LIFETIMES[-1]:
        raise StoreConfigError(f"time to live of {seconds} s: 1s to 90d, or none for no limit")
    return bisect_left(_LIFETIMES, seconds, 1)


def ttl_seconds(number: int) -> int | None:
    """The time to live, from the last use, of blocks whose `ttl_class` is `number` (0 to 255)."""
    return None if number == NEVER else _LIFETIMES[number]


def parse_ttl(text: str) -> dict[str, int | None]:
    """Classes as on a command line: `agent=3d,chat=7d,batch=12h,keep=none`, in seconds.

    Raises:
        StoreConfigError: another form.
    """
    classes: dict[str, int | None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([\w.-]+)=(?:([0-9]{1,9})([smhd])|none)", part.strip())
        if match is None:
            raise StoreConfigError(
                f"time to live {part.strip()!r}: name=number and s, m, h or d, as in agent=3d, or name=none"
            )
        name, count, unit = match.groups()
        classes[name] = None if count is None else int(count) * _UNITS[unit]
    return classes


DEFAULT_TTL: Mapping[str, int | None] = MappingProxyType({"agent": 3 * DAY, "chat": 7 * DAY, "none": None})


@dataclass(frozen=True)
class Retention:
    """What the store keeps. Marks are fractions of the capacity; `hard` is also one of the file system.

    Raises:
        StoreConfigError: marks out of order, a time out of range, an unknown default class.
    """

    ttl: Mapping[str, int | None] | str = field(default_factory=dict)
    """Seconds since the last use, by class; None is no limit. Adds to `DEFAULT_TTL`, or changes it. May be given as
    `parse_ttl` reads it."""
    default_class: str = "agent"
    """The class of requests that name none, or one that does not exist."""
    high: float = 0.85
    """Collection begins above this fill,"""
    low: float = 0.80
    """and ends at this one."""
    hard: float = 0.95
    """Nothing is stored above this fill, and no slab is added that would fill the file system further. 3FS itself
    refuses new chunks at 0.98."""
    expired_per_hour: float = 1 / 24
    """At most this part of the capacity leaves for its age in an hour, so that a clock which jumped, in
    either direction, cannot empty the store before somebody has seen it. Want of space is not held up by it."""
    reclaim: Literal["reuse", "punch"] = "reuse"
    """Whether freed slots keep their storage until they are written again, or give it back. On a file system above
    `hard` they give it back in any case."""

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < self.hard <= 0.98:
            raise StoreConfigError(
                f"watermarks low {self.low}, high {self.high}, hard {self.hard}: must be 0 < low < high < hard <= 0.98"
            )
        if not self.expired_per_hour > 0:
            raise StoreConfigError(f"expired_per_hour is {self.expired_per_hour}: must be above 0")
        if self.reclaim not in ("reuse", "punch"):
            raise StoreConfigError(f"reclaim is {self.reclaim!r}: must be 'reuse' or 'punch'")
        self.number(self.default_class)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Numbers by class. A client's request for another class gets `default_class`, and is counted."""
        own = parse_ttl(self.ttl) if isinstance(self.ttl, str) else self.ttl
        return {name: ttl_number(seconds) for name, seconds in {**DEFAULT_TTL, **own}.items()}

    def number(self, ttl_class: str) -> int:
        """The number of a class that a configuration names.

        Raises:
            StoreConfigError: there is no such class.
        """
        if ttl_class not in self.numbers:
            raise StoreConfigError(
                f"class {ttl_class!r} has no time to live: one of {sorted(self.numbers)}, or name it in retention.ttl"
            )
        return self.numbers[ttl_class]

    def surplus_blocks(self, fill: Fill) -> int:
        """Blocks to collect for space now: above the high mark all down to the low one.

        A disk counts from the hard mark on, for it may be full of other things: what is above it goes, and as much of
        the store as lies between its own marks.
        """
        surplus = 0.0
        if fill.used_blocks > self.high * fill.capacity_blocks:
            surplus = fill.used_blocks - self.low * fill.capacity_blocks
        above_bytes = fill.disk_used_bytes - self.hard * fill.disk.total_bytes
        if above_bytes > 0:
            surplus = max(surplus, above_bytes / fill.slot_bytes + (self.high - self.low) * fill.capacity_blocks)
        return min(ceil(surplus), fill.used_blocks)

    def presses(self, disk: Disk) -> bool:
        """Whether a disk is so full that free slots had better give their storage back."""
        return disk.used_bytes > self.hard * disk.total_bytes

    def room_bytes(self, disk: Disk) -> float:
        """How much may still be added to a disk."""
        return self.hard * disk.total_bytes - disk.used_bytes if disk.total_bytes else inf

    def is_full(self, fill: Fill) -> bool:
        """Whether nothing may be stored now."""
        disk_full = fill.disk_used_bytes > self.hard * fill.disk.total_bytes
        return disk_full or fill.used_blocks >= self.hard * fill.capacity_blocks
