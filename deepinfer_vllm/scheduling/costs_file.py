"""The file of costs, which engines that run at once may share."""

import errno
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from deepinfer_costmodel.step_table import StepTable
from deepinfer_kvstore.whole_file import refuse_special, replacing

PATIENCE_SECONDS = 5.0
"""With another writer, who needs milliseconds unless its disk hangs."""


def rewrite(path: Path, change: Callable[[], StepTable]) -> None:
    """Make `path` the table that `change` gives, whole or not at all. Writers take turns, and `change` is called in
    that of this one: what it reads there is the last word of all others.

    Raises OSError; TimeoutError among them, where another writer does not end.
    """
    refuse_special(path)  # before a lock is put beside /dev/null
    with _turn(path):
        with replacing(path) as draft:
            draft.write_text(json.dumps(change().to_json(), indent=2) + "\n")
        for left in path.parent.glob(f".{escape(path.name)}-*"):
            left.unlink(missing_ok=True)  # by a writer that was killed


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Among threads, processes and containers that see the same file; that of a process that is killed ends too."""
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("a") as file:
        until_s = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TimeoutError(errno.ETIMEDOUT, "another writer does not end", str(lock)) from None
                time.sleep(0.01)
        yield
