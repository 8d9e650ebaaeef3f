"""Small files that readers never see half-written."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str, *, replace: bool = True) -> None:
    """Write `path`. Of several writers at once the last one stays; without `replace` the first.

    Raises:
        FileExistsError: it is there, and `replace` is False.
        OSError: it cannot be written.
    """
    refuse_special(path)
    new = _draft(path)
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
        if replace:
            new.rename(path)
        else:
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path of this writer alone, which takes the place of `path` unless the block raises. Raises OSError."""
    refuse_special(path)
    new = _draft(path)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(8)}")


def refuse_special(path: Path) -> None:
    """Raise OSError for a device, a pipe or a directory: what replaces files would put one in place of /dev/null."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no regular file", str(path))
