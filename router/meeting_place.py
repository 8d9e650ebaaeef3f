"""Where the workers of one router meet to share counts."""

import os
import stat
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")


def meeting_place(supervisor: int) -> Path:
    """A directory in memory for the workers of the process `supervisor`, made by the first that asks.

    Raises OSError: it cannot be made, or somebody else's is there.
    """
    root = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    directory = root / f"deepinfer-router-{os.getuid()}-{supervisor}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory}: must be a directory of user {os.getuid()} alone: remove it")
    return directory


def leave(directory: Path) -> None:
    """Removes it once nobody is there any more."""
    try:
        directory.rmdir()
    except OSError:
        # Others are still there, or were quicker.
        return
