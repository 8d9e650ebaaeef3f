"""Named sets of coefficients, with where they come from: the file that a fleet's operator writes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_costmodel.cost import Cost, CostError

SCHEMA = "deepinfer.costs/1"
MAX_SETS = 256
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CostTable:
    """Coefficients by name. An engine that replays a window computes its decoder layers for few rows, so "replay" and
    "full" of one model are two sets; other names are kinds of engines."""

    costs: dict[str, Cost]
    sources: dict[str, str]
    """Of each set, in words: measured where, or fitted from what."""

    def to_json(self) -> dict[str, Any]:
        """{"schema", "sets": {name: coefficients and source}}; `from_json` reads it."""
        return {
            "schema": SCHEMA,
            "sets": {name: cost.to_json() | {"source": self.sources[name]} for name, cost in self.costs.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> "CostTable":
        """Reads what `to_json` gave. Raises CostError that names the set."""
        if not isinstance(value, dict) or value.keys() != {"schema", "sets"} or value["schema"] != SCHEMA:
            raise CostError(f'a table of costs is {{"schema": "{SCHEMA}", "sets": {{...}}}}')
        sets = value["sets"]
        if not isinstance(sets, dict) or not 1 <= len(sets) <= MAX_SETS:
            raise CostError(f"a table of costs has 1..{MAX_SETS} sets by name")
        costs, sources = {}, {}
        for name, entry in sets.items():
            source = entry.get("source") if isinstance(entry, dict) else None
            if not isinstance(source, str):
                raise CostError(f"costs {name!r}: source, where they come from, is missing")
            try:
                costs[name] = Cost.from_json({key: item for key, item in entry.items() if key != "source"})
            except CostError as error:
                raise CostError(f"costs {name!r}: {error}") from None
            sources[name] = source
        return cls(costs, sources)


def read_table(path: Path) -> CostTable:
    """The table in the JSON file `path`. Raises CostError that names the file; OSError if it cannot be opened."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise CostError(f"{path}: more than {MAX_FILE_BYTES} bytes; a table of costs is small")
    try:
        return CostTable.from_json(json.loads(data))
    except (CostError, ValueError, RecursionError) as error:
        raise CostError(f"{path}: {error}") from None
