"""The reports of the operators' commands as lines of text."""

from time import time
from typing import Any

Report = dict[str, Any]


def check_lines(report: Report) -> list[str]:
    """What was read, and each damaged block and dead writer."""
    dead = [writer for writer in report["writers"] if not writer["alive"]]
    orphans = "" if report["orphans"] is None else f", {report['orphans']:,} orphans"
    return [
        f"{_head(report)}{report['slots_read']:,} slots read, {report['intact']:,} blocks whole, "
        f"{_counts(report['damaged'])} damaged{orphans}; "
        f"{len(report['writers']) - len(dead)} writers alive, {len(dead)} dead",
        *(f"  damaged: {found['key']} in {_place(found)}: {found['why']}" for found in report["damaged_blocks"]),
        *(f"  dead: writer {writer['writer']:08x}, last {writer['host']} pid {writer['pid']}" for writer in dead),
    ]


def repair_lines(report: Report) -> list[str]:
    """What was mended."""
    return [
        f"{_head(report)}{report['adopted']:,} blocks taken up, {_counts(report['dropped'])} deleted, "
        f"{_counts(report['left'])} damaged ones left"
    ]


def stats_lines(report: Report) -> list[str]:
    """Sums, a line a subject."""
    lines = [
        f"{_head(report)}{report['keys']:,} blocks, {size(report['bytes'])}",
        f"  capacity: {size(report['used_bytes'])} used{_of(report['used_bytes'], report['capacity_bytes'])}",
        f"  slots: {report['slots_used']:,} of {report['slots']:,} used, of {report['slot_bytes']:,} bytes",
        f"  disk: slabs {size(report['slab_disk_bytes'])}, journals {size(report['journal_bytes'])}, "
        f"{size(report['disk_free_bytes'])} of {size(report['disk_bytes'])} free",
        f"  writers: {report['writers_alive']} alive, {report['writers_dead']} dead",
    ]
    for tag, sums in report["tenants"].items():
        lines.append(f"  tenant {tag}: {sums['keys']:,} blocks, {size(sums['bytes'])}")
    for seconds, sums in report["ttl_seconds"].items():
        kept = "without limit" if seconds == "None" else duration(int(seconds))
        lines.append(f"  kept {kept}: {sums['keys']:,} blocks, {size(sums['bytes'])}")
    if "ages" in report:
        lines.append("  last used: " + ", ".join(f"{name} {count:,}" for name, count in report["ages"].items()))
    return lines


def ls_lines(report: Report) -> list[str]:
    """A line a block."""
    now_ms = time() * 1000
    return [
        f"{_head(report)}{len(report['blocks'])} blocks",
        *(
            f"  {block['key']} {block['bytes']} B, {block['tokens']} tokens, "
            f"{_used((now_ms - block['touched_ms']) / 1000)}, tenant {block['tenant']}, {_place(block)}"
            for block in report["blocks"]
        ),
    ]


def purge_lines(report: Report) -> list[str]:
    """What was deleted."""
    return [
        f"{_head(report)}{report['blocks']:,} blocks ({size(report['bytes'])}) chosen, {report['deleted']:,} deleted"
        + (", files removed" if report["removed"] else "")
    ]


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there are two."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g}{unit}"
    return f"{seconds:.0f}s"


def _of(used: int, capacity: int | None) -> str:
    return f" of {size(capacity)}, {used / capacity:.0%}" if capacity else ""


def _used(seconds_ago: float) -> str:
    return f"used {duration(seconds_ago)} ago" if seconds_ago >= 0 else f"pinned for {duration(-seconds_ago)}"


def _head(report: Report) -> str:
    return f"{report['namespace']} {report['model']}: "


def _counts(counts: dict[str, int]) -> str:
    reasons = ", ".join(f"{why} {count:,}" for why, count in counts.items())
    return f"{sum(counts.values()):,}" + (f" ({reasons})" if reasons else "")


def _place(found: Report) -> str:
    return f"{found['writer']:08x}-{found['slab']:08x} slot {found['slot']}"
