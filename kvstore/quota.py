"""What a namespace may take, for a daemon that collects in place of engines: `quota.json`, by the last that opened."""

import json
from dataclasses import dataclass
from pathlib import Path

from deepinfer_kvstore.retention import Retention

_MAX_BYTES = 4096
_MARKS = ("low", "high", "hard", "expired_per_hour")


@dataclass(frozen=True)
class Quota:
    """Capacity of a namespace, its slots, and when to collect."""

    capacity_bytes: int
    slot_bytes: int
    retention: Retention

    def to_json(self) -> str:
        """Text of `quota.json`. Classes are left out: each block carries its own time to live."""
        marks = {name: getattr(self.retention, name) for name in _MARKS}
        return json.dumps({"capacity_bytes": self.capacity_bytes, "slot_bytes": self.slot_bytes, **marks}) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Quota | None":
        """None: no such file, or not one of these."""
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
            capacity_bytes, slot_bytes = int(found["capacity_bytes"]), int(found["slot_bytes"])
            low, high, hard, expired_per_hour = (float(found[name]) for name in _MARKS)
            retention = Retention(low=low, high=high, hard=hard, expired_per_hour=expired_per_hour)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
        return cls(capacity_bytes, slot_bytes, retention) if 0 < slot_bytes <= capacity_bytes else None
