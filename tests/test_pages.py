"""Pages that list files name every one, and nothing that is not there."""

import re
from pathlib import Path

import pytest

from deepinfer_vllm.kv_connector.config import STORE, ConnectorConfig

MODEL = "deepinfer_vllm/models/deepseek_v41"


def test_every_file_of_the_model_has_its_row(root: Path) -> None:
    section = (root / "docs/model.md").read_text().split("## Files")[1].split("##")[0]
    patterns = re.findall(r"`([a-z0-9_*]+\.py)`", section)
    named = {file.name for pattern in patterns for file in (root / MODEL).glob(pattern)}
    assert named == {file.name for file in (root / MODEL).glob("*.py")} - {"__init__.py"}
    assert [pattern for pattern in patterns if not list((root / MODEL).glob(pattern))] == []


def test_every_file_about_checkpoints_has_its_row(root: Path) -> None:
    directory = root / "deepinfer_vllm/checkpoint"
    named = re.findall(r"`([a-z_]+\.py)`", (directory / "README.md").read_text())
    assert {*named} == {file.name for file in directory.glob("*.py")} - {"__init__.py"}


PAGE_OF = {
    "kvstore": "kvstore",
    "deepinfer_vllm/kv_connector": "kvstore",
    "router": "router",
    "costmodel": "router",
    "simulator": "router",
    "deepinfer_vllm/scheduling": "scheduling",
    "deepinfer_vllm/eplb": "eplb",
    "deepinfer_vllm/spec_decode": "dspark",
    "deepinfer_vllm/training": "dspark",
    "deepinfer_vllm/evaluation": "evaluation",
    "deepinfer_vllm/platforms": "ascend",
    "deepinfer_vllm/platforms/tilelang": "ascend-kernels",
}


@pytest.mark.parametrize("directory", PAGE_OF)
def test_every_file_has_one_row(root: Path, directory: str) -> None:
    page = (root / f"docs/{PAGE_OF[directory]}.md").read_text()
    section = page.split(f"In `{directory}/`:")[1].split("\nIn `")[0]
    patterns = re.findall(r"`([a-z0-9_*]+\.py)`", section)
    named = [file.name for pattern in patterns for file in (root / directory).glob(pattern)]
    assert sorted(named) == sorted({file.name for file in (root / directory).glob("*.py")} - {"__init__.py"})
    assert [pattern for pattern in patterns if not list((root / directory).glob(pattern))] == []


def test_every_option_of_the_connector_is_on_its_page(root: Path) -> None:
    page = (root / "docs/kvstore.md").read_text()
    options = {*ConnectorConfig.model_fields, *STORE} - {"options"}
    assert {name for name in options if not re.search(rf"\b{name}\b", page)} == set()


@pytest.mark.parametrize(
    ("page", "heading"), [("model", "## What is tested where"), ("dspark", "## What works with what")]
)
def test_every_test_it_names_is_there(root: Path, page: str, heading: str) -> None:
    section = (root / f"docs/{page}.md").read_text().split(heading)[1]
    names = re.findall(r"`((?:tests/)?[a-z0-9_*/]*(?:\.py|/))`", section.split("\n## ")[0])
    assert len(names) > 10
    missing = [n for n in names if not (list(root.glob(n)) or list((root / "tests").rglob(n)))]
    assert missing == []


def test_every_link_to_a_file_leads_there(root: Path) -> None:
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/results/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    assert len(links) > 50
    assert [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_rows_of_tables_have_the_cells_of_their_heads(root: Path) -> None:
    """A bar inside a cell ends it, also in code: what is behind the last column is not shown."""
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/results/*.md")]
    assert len(pages) > 40
    wrong = []
    for page in pages:
        cells = 0
        for number, line in enumerate(page.read_text().splitlines(), 1):
            found = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            if cells and found and found != cells:
                wrong.append(f"{page}:{number}")
            cells = cells if cells and found else found
    assert not wrong
