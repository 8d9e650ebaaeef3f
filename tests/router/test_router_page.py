"""docs/router.md: snippets are configurations; settings, metrics, options, tests and links in it are there."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepinfer_router import reference
from deepinfer_router.config import RouterConfig
from deepinfer_router.config_source import ConfigSource, checked
from deepinfer_vllm.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs/router.md").read_text()
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^deepinfer ([^#\n]*?) *(?:#.*)?$", PAGE, re.MULTILINE)
SECRET = {"ADMIN_TOKEN": "a token of sixteen"}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.partition(":")[0])
def test_every_snippet_is_a_configuration(tmp_path: Path, snippet: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(snippet)
    checked({"engines": ["http://127.0.0.1:8000"], **ConfigSource(file).read(SECRET)}, "docs/router.md")


def test_there_are_snippets_and_commands() -> None:
    assert len(SNIPPETS) > 12 and len(COMMANDS) > 7


def test_every_setting_it_names_is_there() -> None:
    known = {part for name, _ in reference.settings() for part in parents(name.replace("[]", ""))}
    sections = "|".join(RouterConfig.model_fields)
    named = set(re.findall(rf"`((?:{sections})(?:\.[a-z_]+)+)\b", PAGE.split("## Files")[0]))
    assert len(named) > 15 and named <= known, named - known


def parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def test_every_metric_it_names_is_there() -> None:
    families = {family["name"] + ("_total" if family["kind"] == "counter" else "") for family in reference.metrics()}
    table = PAGE.split("| `deepinfer_router_` | Says |")[1].split("\n\n")[0]
    named = re.findall(r"`deepinfer_router_([a-z_]+)(\*?)", PAGE) + re.findall(r"`([a-z_]+)(?:{[a-z,]*})?()`", table)
    assert len(named) > 20
    for name, more in named:
        whole = f"deepinfer_router_{name}"
        assert any(family.startswith(whole) for family in families) if more else whole in families, name


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_option_of_its_commands_is_there(command: str) -> None:
    name, *words = command.split()
    path = [name, words[0]] if words[0][0] != "-" else [name]
    help_text = CliRunner().invoke(app, [*path, "--help"]).output
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", help_text))


def test_every_test_it_names_is_there(root: Path) -> None:
    names = set(re.findall(r"`((?:tests/)?[a-z_/]*(?:test_[a-z_]+\.py|tests/[a-z]+/))`", PAGE))
    assert len(names) > 50
    assert [name for name in names if not (root / name).exists() and not list((root / "tests").rglob(name))] == []


def test_every_place_it_links_to_is_there(root: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", PAGE):
        target = root / "docs" / path if path else root / "docs/router.md"
        assert target.exists() or path.startswith("../benchmarks/results/"), path
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor
