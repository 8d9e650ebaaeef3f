"""The file of costs, which engines that run at once may share."""

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from deepinfer_costmodel.step_table import StepTable
from deepinfer_kvstore.whole_file import refuse_special, replacing

PATIENCE_SECONDS = 5.0
"""With another writer, who needs milliseconds unless its disk hangs."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_DRAFT = "[0-9a-f]" * 16
"""Ends the name of a file that is to take another's place: see `replacing`."""


def rewrite(path: Path, change: Callable[[], StepTable]) -> None:
    """Make `path`, or what it links to, the table that `change` gives, whole or not at all. Writers take turns, and
    `change` is called in that of this one: what it reads there is the last word of all others. On a file system without
    locks one of two that write at once may lose its set.

    Raises OSError; TimeoutError among them, where another writer does not end.
    """
    path = Path(os.path.realpath(path))  # one lock for all names of a file
    refuse_special(path)  # before a lock is put beside /dev/null
    with _turn(path) as alone:
        with replacing(path) as draft:
            draft.write_text(json.dumps(change().to_json(), indent=2) + "\n")
        if alone:
            for left in path.parent.glob(f".{escape(path.name)}-{_DRAFT}"):
                left.unlink(missing_ok=True)  # by a writer that was killed


@contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Among threads, processes and containers that see the same file; that of a process that is killed ends too.

    Whether it is one: not on a file system without locks. Raises OSError.
    """
    lock = path.with_name(f".{path.name}.lock")
    file = _opened(lock)
    try:
        until_s = time.monotonic() + PATIENCE_SECONDS
        alone = False
        while not alone:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TimeoutError(errno.ETIMEDOUT, "another writer does not end", str(lock)) from None
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        yield alone
    finally:
        os.close(file)


def _opened(lock: Path) -> int:
    """Its descriptor. Another user's is only read, which is enough for a lock except on NFS. Raises OSError."""
    try:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except PermissionError:
        file = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no regular file", str(lock))
    return file
