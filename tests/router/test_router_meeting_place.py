"""Where workers meet: theirs alone."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_router import meeting_place as module
from deepinfer_router.meeting_place import leave, meeting_place


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    return tmp_path


def test_one_a_supervisor_until_the_last_leaves(memory: Path) -> None:
    first = meeting_place(os.getpid())
    assert meeting_place(os.getpid()) == first != meeting_place(os.getppid())
    assert first.parent == memory and first.stat().st_mode & 0o777 == 0o700
    (first / "x").touch()
    leave(first)
    assert first.exists()
    (first / "x").unlink()
    leave(first)
    leave(first)
    assert not first.exists()


def test_what_others_could_have_laid_there_is_refused(memory: Path) -> None:
    target = meeting_place(os.getpid())
    target.chmod(0o777)
    with pytest.raises(PermissionError, match="of user"):
        meeting_place(os.getpid())
    target.chmod(0o700)
    os.symlink(target, memory / f"deepinfer-router-{os.getuid()}-2")
    with pytest.raises(PermissionError):
        meeting_place(2)
    (memory / f"deepinfer-router-{os.getuid()}-3").touch()
    with pytest.raises(FileExistsError):
        meeting_place(3)


def test_what_the_killed_have_left_is_swept(memory: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    alive, locked = meeting_place(os.getpid()), meeting_place(ended.pid)
    for directory in (alive, locked):
        (directory / "x.counts").touch()
    with (locked / "y.counts").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        meeting_place(os.getppid())
        assert [path.name for path in alive.iterdir()] == ["x.counts"]
        assert [path.name for path in locked.iterdir()] == ["y.counts"]
    meeting_place(os.getppid())
    assert alive.exists() and not locked.exists()


def test_nothing_is_swept_through_a_link(memory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o700)
    (elsewhere / "x.counts").touch()
    os.symlink(elsewhere, memory / f"deepinfer-router-{os.getuid()}-999999999999999999999999")
    meeting_place(os.getpid())
    assert (elsewhere / "x.counts").exists()
