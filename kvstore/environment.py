"""The LMDB environment of an index: opened once a process, trusted only where it may be, grown and replaced in place.

LMDB runs without fsync. A crashed process costs nothing; after a crash of the system the file may be anything.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock
from typing import Any, ClassVar

import lmdb

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.index_files import IndexFiles
from deepinfer_kvstore.network_fs import require_local

MAP_BYTES = 1 << 30
"""Address space to begin with. It doubles when full; the file is only as large as what is in it."""
DATABASES = (b"keys", b"rivals", b"slots", b"queue", b"watched", b"totals", b"journals")
READERS = 1024
"""Threads of all processes that may read at one moment."""
LOCK_BYTES = READERS * 64 + 4096
"""Of the lock file: as LMDB has it for so many readers, and a little more."""
DAMAGE = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.PanicError, lmdb.VersionMismatchError,
    lmdb.IncompatibleError, lmdb.BadDbiError, lmdb.PageFullError, lmdb.CursorFullError,
)  # fmt: skip
"""Other errors pass by themselves: a full disk, too many readers."""
_NONE_OPEN = ((-1, -1), (-1, -1))


class Environment:
    """One LMDB environment of this process, shared by all who open its path. Thread-safe. Not for forked children.

    `lmdb.Error` comes out of `read` and `write` as it is: what to make of it is the index's business.
    """

    _shared: ClassVar[dict[Path, "Environment"]] = {}
    _sharing: ClassVar[Lock] = Lock()

    @classmethod
    def share(cls, path: Path, identity: dict[str, str], map_bytes: int, boot: Callable[[], str]) -> "Environment":
        """The environment in directory `path`; made, or made anew where it cannot be trusted. Pair with `release`.

        Raises:
            StoreConfigError: `path` is on a network file system, cannot be written, or its `identity` is another.
        """
        path = Path(os.path.realpath(path))
        with cls._sharing:
            found = cls._shared.get(path)
            if found is None:
                found = cls._shared[path] = cls(path, identity, map_bytes, boot)
            elif not found.usable:
                raise StoreConfigError(
                    f"index {path} was open when this process was forked: open stores after the fork"
                )
            found.files.require(identity)
            found._users += 1
            return found

    def __init__(self, path: Path, identity: dict[str, str], map_bytes: int, boot: Callable[[], str]) -> None:
        """See `share`."""
        self.path = path
        self.files = IndexFiles(path, identity, boot)
        self._process = os.getpid()
        self.databases: dict[bytes, Any] = {}
        self.incarnation = 0
        """Counts the files that this object has had open: what was read from an earlier one says nothing now."""
        self._map_bytes = map_bytes
        self._users = 0
        self._readers = 0
        self._excluded = False
        self._changed = Condition()
        self._writing = Lock()
        self._identities = _NONE_OPEN
        require_local(path)
        try:
            with self._alone():
                self._open()
        except OSError as error:
            raise StoreConfigError(
                f"index directory {path}: {error.strerror}: set index_dir to a writable directory on a local disk"
            ) from error
        except lmdb.Error as error:
            raise StoreConfigError(f"index directory {path}: {error}: set index_dir to another directory") from error

    def release(self) -> None:
        """Close the environment when its last user in this process has released it."""
        with self._sharing:
            if self._users == 1 and self.usable:
                self._mark_clean()
                del self._shared[self.path]
            self._users -= 1
            if not self._users and self._process == os.getpid():
                with self._writing, self._exclusive():
                    self._lmdb.close()

    @property
    def usable(self) -> bool:
        """Whether this is the process that opened it, and has not closed it."""
        return self._process == os.getpid() and bool(self._users)

    @contextmanager
    def read(self, database: bytes) -> Iterator[Any]:
        """A snapshot of one database. Keep it short: pages freed since are not used again until it ends."""
        transaction = self._begin(database)
        try:
            with transaction:
                yield transaction
        finally:
            self._leave()

    def write(self, change: Callable[[Any], None]) -> None:
        """Run `change(transaction)` and commit; once more with a larger map where this one is full."""
        self._require_usable()
        with self._writing:
            while True:
                try:
                    with self._lmdb.begin(write=True) as transaction:
                        self.files.unmark_clean()
                        change(transaction)
                    return
                except lmdb.MapFullError:
                    self._lmdb.reader_check()
                    with self._exclusive():
                        self._map_bytes = 2 * self._lmdb.info()["map_size"]
                        self._lmdb.set_mapsize(self._map_bytes)
                except lmdb.MapResizedError:
                    self._follow_size()

    def last_transaction(self) -> tuple[int, int]:
        """Changes whenever anyone commits, or the file is replaced. About a microsecond."""
        return self.incarnation, self._lmdb.info()["last_txnid"]

    def replaced(self) -> bool:
        """Whether the path no longer leads to the files that are open: one removed, or replaced by another process."""
        return self.files.identities() != self._identities

    def reopen(self, *, discard: bool) -> None:
        """Open what the path leads to now. With `discard`, begin with an empty one unless another process just has.

        Raises:
            lmdb.Error, OSError: it cannot be opened. Nothing is readable then, until a later call succeeds.
        """
        with self._writing, self._alone(), self._exclusive():
            self._lmdb.close()
            before, self._identities = self._identities, _NONE_OPEN
            if discard and self.files.identities() == before:
                self.files.discard()
            self._open()

    def _begin(self, database: bytes) -> Any:
        """A read transaction, this thread being counted as a reader until it calls `_leave`."""
        self._require_usable()
        for last in (False, True):
            with self._changed:
                self._changed.wait_for(lambda: not self._excluded)
                self._readers += 1
            try:
                return self._lmdb.begin(self.databases[database])
            except (lmdb.ReadersFullError, lmdb.MapResizedError) as error:
                self._leave()
                if last:
                    raise
                if isinstance(error, lmdb.MapResizedError):  # by another process
                    with self._writing:
                        self._follow_size()
                else:  # by processes that were killed, most likely
                    self._lmdb.reader_check()
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        with self._changed:
            self._readers -= 1
            if not self._readers:
                self._changed.notify_all()

    def _follow_size(self) -> None:
        with self._exclusive():
            self._lmdb.set_mapsize(0)

    def _require_usable(self) -> None:
        if not self.usable:
            raise lmdb.Error("the index is closed, or was opened before this process was forked")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Wait until no thread of this process reads, and keep them out: maps move, and files are closed."""
        with self._changed:
            self._excluded = True
            try:
                self._changed.wait_for(lambda: not self._readers)
                yield
            finally:
                self._excluded = False
                self._changed.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from opening or discarding at the same time."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.path / "open.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _open(self) -> None:
        if not self.files.trusted() or not self.files.are_a_pair():
            self.files.discard()
        try:
            self._attach()
        except DAMAGE:
            self.files.discard()
            self._attach()
        self.files.sign()

    def _attach(self) -> None:
        self.files.reserve_lock(LOCK_BYTES)
        self._lmdb = lmdb.open(
            os.fsencode(self.path), map_size=self._map_bytes, max_dbs=len(DATABASES), max_readers=READERS, mode=0o600,
            sync=False, metasync=False, readahead=False,
        )  # fmt: skip
        try:
            self._lmdb.reader_check()
            pages, page_bytes = self._lmdb.info()["last_pgno"] + 1, self._lmdb.stat()["psize"]
            # Reading a page beyond the file's end would kill the process.
            if self.files.data_bytes() < pages * page_bytes:
                raise lmdb.CorruptedError("the file is shorter than its pages")
            self.databases = {name: self._lmdb.open_db(name) for name in DATABASES}
            self._identities = self.files.identities()
            self.incarnation += 1
        except BaseException:
            self._lmdb.close()
            raise

    def _mark_clean(self) -> None:
        """Flush, and say so. Inside a write transaction, so that nobody can write between the two."""
        with suppress(lmdb.Error, OSError), self._lmdb.begin(write=True):
            self._lmdb.sync(True)
            if not self.replaced():
                self.files.mark_clean()
