"""Fixtures that more than one test file uses."""

from pathlib import Path

import pytest

from fake_site import FakeSite


@pytest.fixture
def root() -> Path:
    """The root of the project."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    """An empty fake site-packages."""
    path = tmp_path / "site-packages"
    path.mkdir()
    return FakeSite(path)
