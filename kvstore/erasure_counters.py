"""What the erasure-coded back end counts."""

from dataclasses import dataclass, field, fields
from threading import Lock


@dataclass
class Counters:
    """Totals since the back end was opened. Thread-safe."""

    reads: int = 0
    """Runs of slots that were read."""
    extra_roots: int = 0
    """Roots that a read asked beyond k + 1, because one failed or was late."""
    bad_shards: int = 0
    """Shards that were read and were torn, old, of another write or of another slot."""
    computed_shards: int = 0
    """Data shards that had to be computed from parity."""
    unreadable_slots: int = 0
    """Slots of which fewer than k good shards of one write were found, never written ones among them."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, **numbers: int) -> None:
        """Add to the fields of these names."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self, name, getattr(self, name) + number)

    def totals(self) -> dict[str, int]:
        """All of them, of one moment."""
        with self._lock:
            return {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name[0] != "_"}
