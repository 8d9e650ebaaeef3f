"""What no text of the project may contain."""

import os
from collections.abc import Iterator
from pathlib import Path

# Where packages come from is the business of the machine that installs them. Split, so as not to be found here.
REGISTRY_HOSTS = ("pypi" + ".org", "files.python" + "hosted.org", "debian" + ".org", "npm" + "js")
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".demo"}


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Path and content of each text file of the project."""
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_OURS and not name.endswith(".egg-info")]
        for name in names:
            path = Path(directory, name)
            content = b"" if path.is_symlink() else path.read_bytes()
            if b"\0" not in content:
                yield str(path.relative_to(root)), content.decode(errors="replace")


def test_the_walk_sees_the_project(root: Path) -> None:
    assert {"README.md", "Makefile", ".ci/run", "tests/test_project_texts.py"} <= dict(texts(root)).keys()


def test_no_registry_is_named(root: Path) -> None:
    found = [(path, host) for path, text in texts(root) for host in REGISTRY_HOSTS if host in text.lower()]
    assert found == []
