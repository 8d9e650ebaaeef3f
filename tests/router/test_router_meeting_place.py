"""Where workers meet: theirs alone."""

import os
from pathlib import Path

import pytest

from deepinfer_router import meeting_place as module
from deepinfer_router.meeting_place import leave, meeting_place


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    return tmp_path


def test_one_a_supervisor_until_the_last_leaves(memory: Path) -> None:
    first = meeting_place(5)
    assert meeting_place(5) == first != meeting_place(6)
    assert first.parent == memory and first.stat().st_mode & 0o777 == 0o700
    (first / "x").touch()
    leave(first)
    assert first.exists()
    (first / "x").unlink()
    leave(first)
    leave(first)
    assert not first.exists()


def test_what_others_could_have_laid_there_is_refused(memory: Path) -> None:
    target = meeting_place(1)
    target.chmod(0o777)
    with pytest.raises(PermissionError, match="of user"):
        meeting_place(1)
    target.chmod(0o700)
    os.symlink(target, memory / f"deepinfer-router-{os.getuid()}-2")
    with pytest.raises(PermissionError):
        meeting_place(2)
    (memory / f"deepinfer-router-{os.getuid()}-3").touch()
    with pytest.raises(FileExistsError):
        meeting_place(3)
