"""Repairing a namespace: blocks that are not there are deleted, whole blocks that no journal knows are said anew.

With journals and index lost this makes both again from the slabs. What headers cannot tell is lost: uses since the
block was written, and deletions whose slots nobody has written to since.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deepinfer_kvstore.header import Flaw
from deepinfer_kvstore.inspection import Damaged, Orphan, Trouble
from deepinfer_kvstore.record import Op, Record

BATCH = 512
KEPT = frozenset([Flaw.MAC, Trouble.UNREADABLE])
"""Damage that may be ours: another secret, a disk that will be back."""


@dataclass
class Repaired:
    """What a repair did."""

    adopted: int = 0
    """Blocks said anew."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Blocks deleted, by what was wrong."""
    left: Counter[str] = field(default_factory=Counter)
    """Blocks that are damaged and still promised, by what is wrong."""


def repair(findings: Iterable[Damaged | Orphan], append: Callable[[Sequence[Record]], object]) -> Repaired:
    """Append to a journal what mends `findings`. Harmless while engines run.

    Raises:
        OSError: what `append` raises, or the slabs cannot be read.
    """
    done = Repaired()
    batch: list[Record] = []
    for found in findings:
        if isinstance(found, Orphan):
            batch.append(Record(Op.PUT, found.key, found.entry))
            done.adopted += 1
        elif found.why in KEPT:
            done.left[found.why] += 1
        else:
            batch.append(Record.delete(found.key, found.location))
            done.dropped[found.why] += 1
        if len(batch) >= BATCH:
            append(batch)
            batch = []
    if batch:
        append(batch)
    return done
