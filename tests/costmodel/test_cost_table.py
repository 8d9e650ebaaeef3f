"""The file of named coefficients."""

import json
from pathlib import Path

import pytest

from deepinfer_costmodel.cost import Cost, CostError
from deepinfer_costmodel.priors import PRIORS
from deepinfer_costmodel.table import MAX_FILE_BYTES, CostTable, read_table

TWO = CostTable(
    costs={"replay": Cost(0.01, 1e-5, 1e-9, 1024, 1e-10), "full": Cost(0.01, 2e-5, 1e-9, 1024, 2e-10)},
    sources={"replay": "measured", "full": "measured"},
)


@pytest.mark.parametrize("table", [TWO, PRIORS])
def test_file_round_trip(tmp_path: Path, table: CostTable) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table.to_json()))
    assert read_table(path) == table


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "deepinfer.costs/1", "sets": {}}',
        '{"schema": "deepinfer.costs/1", "sets": []}',
        "[" * 100_000,
        " " * (MAX_FILE_BYTES + 1),
    ],
)
def test_file_that_is_not_a_table_names_itself(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostError, match=r"costs\.json"):
        read_table(path)


def test_wrong_set_is_named() -> None:
    value = TWO.to_json()
    value["sets"]["full"]["beta"] = -1
    with pytest.raises(CostError, match=r"'full'.*beta"):
        CostTable.from_json(value)
    del value["sets"]["full"]["source"]
    with pytest.raises(CostError, match=r"'full'.*source"):
        CostTable.from_json(value)
