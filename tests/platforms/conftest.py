"""Fixtures of the platforms' tests."""

from typing import Any

import pytest
from configured_engines import configure


@pytest.fixture(scope="session")
def configured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case of configured_engines.py: one subprocess for all files."""
    return configure(tmp_path_factory.mktemp("engines"))
