"""Where the workers of one router meet to share counts."""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")


def meeting_place(supervisor: int) -> Path:
    """A directory in memory for the workers of the process `supervisor`, made by the first that asks.

    What routers that were killed have left is removed: files that nobody locks, of supervisors that are no more.

    Raises OSError: it cannot be made, or somebody else's is there.
    """
    root = _MEMORY if _MEMORY.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))
    name = f"deepinfer-router-{os.getuid()}-"
    for other in root.glob(f"{name}*"):
        if _is_ours(other) and not Path("/proc", other.name.removeprefix(name)).exists():
            _sweep(other)
    directory = root / f"{name}{supervisor}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(directory):
        raise PermissionError(f"{directory}: must be a directory of user {os.getuid()} alone: remove it")
    return directory


def leave(directory: Path) -> None:
    """Removes it once nobody is there any more."""
    try:
        directory.rmdir()
    except OSError:
        # Others are still there, or were quicker.
        return


def _is_ours(directory: Path) -> bool:
    """A directory, no link to one, that only this user can write: anybody may have laid something in /dev/shm."""
    with suppress(FileNotFoundError):
        found = directory.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


def _sweep(directory: Path) -> None:
    with suppress(OSError):
        for path in directory.glob("*.counts"):
            with path.open("rb") as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()
        directory.rmdir()
