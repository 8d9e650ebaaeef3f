"""What lies where a regular file is expected."""

import os
from pathlib import Path

KINDS = ("pipe", "device", "directory")


def put(path: Path, kind: str) -> None:
    """Make `path` one of `KINDS`; the device is /dev/null, by a link."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
