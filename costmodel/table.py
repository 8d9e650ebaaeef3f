"""Named sets of coefficients, with where they come from: the file that a fleet's operator writes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deepinfer_costmodel.cost import Cost, CostError

SCHEMA = "deepinfer.costs/1"
MAX_SETS = 256
MAX_FILE_BYTES = 1 << 20

T = TypeVar("T")


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
        return cls(*sets_from_json(value, SCHEMA, Cost.from_json))


def sets_from_json(value: Any, schema: str, parse: Callable[[Any], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Sets by name, each of them `parse`d, and their sources. Raises CostError that names the set."""
    if not isinstance(value, dict) or value.keys() != {"schema", "sets"} or value["schema"] != schema:
        raise CostError(f'a table of costs is {{"schema": "{schema}", "sets": {{...}}}}')
    sets = value["sets"]
    if not isinstance(sets, dict) or not 1 <= len(sets) <= MAX_SETS:
        raise CostError(f"a table of costs has 1..{MAX_SETS} sets by name")
    costs, sources = {}, {}
    for name, entry in sets.items():
        source = entry.get("source") if isinstance(entry, dict) else None
        if not isinstance(source, str):
            raise CostError(f"costs {name!r}: source, where they come from, is missing")
        try:
            costs[name] = parse({key: item for key, item in entry.items() if key != "source"})
        except CostError as error:
            raise CostError(f"costs {name!r}: {error}") from None
        sources[name] = source
    return costs, sources


def read_table(path: Path) -> CostTable:
    """The table in the JSON file `path`. Raises CostError that names the file; OSError if it cannot be opened."""
    return read_as(path, CostTable.from_json)


def read_as(path: Path, parse: Callable[[Any], T]) -> T:
    """What `parse` makes of the JSON file `path`. Raises CostError that names the file; OSError: it cannot be read."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise CostError(f"{path}: more than {MAX_FILE_BYTES} bytes; a table of costs is small")
    try:
        return parse(json.loads(data))
    except (CostError, ValueError, RecursionError) as error:
        raise CostError(f"{path}: {error}") from None
