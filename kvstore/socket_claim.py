"""The unix socket of a daemon: one process has it, and that of a dead one is in nobody's way."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.opening import default_index_dir

MAX_SOCKET_BYTES = 107
"""Of a unix socket's path."""


def socket_path(root: Path) -> Path:
    """Where a daemon of the store at `root` is found by processes of the same user on the same node."""
    return default_index_dir(root) / "check.sock"


@contextmanager
def claimed_socket(path: Path) -> Iterator[Path]:
    """A path for a unix socket that no other process uses: a dead one's socket is removed, and ours at the end.

    Raises:
        StoreConfigError: a living process has it, or it cannot be there.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        raise StoreConfigError(f"socket {path} has more than {MAX_SOCKET_BYTES} bytes: name a shorter one (--socket)")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreConfigError(f"socket {path}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and not path.is_socket():
            raise StoreConfigError(f"{path} is there and no socket: remove it or name another (--socket)")
        path.unlink(missing_ok=True)
        yield path
        path.unlink(missing_ok=True)
    except BlockingIOError as error:
        raise StoreConfigError(f"a daemon serves {path} already: stop it, or name another socket (--socket)") from error
    finally:
        os.close(lock)
