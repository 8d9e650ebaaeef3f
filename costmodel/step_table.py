"""Named sets of what steps take, in a file that an engine writes and the next one starts from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_costmodel.cost import CostError
from deepinfer_costmodel.step import StepCost
from deepinfer_costmodel.table import read_as, sets_from_json

SCHEMA = "deepinfer.step-costs/1"


@dataclass(frozen=True, slots=True)
class StepTable:
    """As `CostTable`, with its names: "replay" and "full" of one engine."""

    costs: dict[str, StepCost]
    sources: dict[str, str]
    """Of each set, in words."""

    def having(self, name: str, cost: StepCost, source: str) -> "StepTable":
        """With this set, in place of one of that name."""
        return StepTable({**self.costs, name: cost}, {**self.sources, name: source})

    def to_json(self) -> dict[str, Any]:
        """{"schema", "sets": {name: coefficients and source}}; `read_step_table` reads a file of it."""
        sets = {name: cost.to_json() | {"source": self.sources[name]} for name, cost in self.costs.items()}
        return {"schema": SCHEMA, "sets": sets}


def read_step_table(path: Path) -> StepTable:
    """The table in the JSON file `path`. Raises CostError that names the file; OSError if it cannot be opened."""
    if not path.is_file() and path.exists():  # a pipe would keep the reader waiting
        raise CostError(f"{path} is no regular file")

    def parse(value: Any) -> StepTable:
        return StepTable(*sets_from_json(value, SCHEMA, StepCost.from_json))

    return read_as(path, parse)
