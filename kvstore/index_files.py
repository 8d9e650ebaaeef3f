"""The files of an index's directory: whose they are, and whether they may be trusted.

`data.mdb` and `lock.mdb` are LMDB's. `identity.json` says which namespace and root they are an index of, and which boot
of the system wrote them. `clean` is there while everything is flushed and nobody has written since.
"""

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deepinfer_kvstore.errors import StoreConfigError

INDEX_FORMAT = 1
"""An index of a smaller number is of an older version: it is made again from the journals."""


Identity = tuple[int, int]
NO_FILE: Identity = (0, 0)


def _identity(path: Path) -> Identity:
    try:
        found = os.stat(path)
    except OSError:
        return NO_FILE
    return found.st_dev, found.st_ino


def boot_id() -> str:
    """Names this run of the operating system; "" where it has no name, and then only what was flushed is trusted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class IndexFiles:
    """The files in `path`, an index of `identity`: names of what must not differ, and their values."""

    def __init__(self, path: Path, identity: dict[str, str], boot: Callable[[], str]) -> None:
        """`boot` names the run of the operating system."""
        self.path = path
        self.identity = identity
        self._boot = boot

    def require(self, identity: dict[str, str]) -> None:
        """Raises:
        StoreConfigError: the files are of another identity.
        """
        if identity != self.identity:
            raise StoreConfigError(
                f"index directory {self.path} belongs to {self.identity}, not to {identity}:"
                " remove it or set index_dir to another"
            )

    def trusted(self) -> bool:
        """Whether they are ours and whole.

        Raises:
            StoreConfigError: they are somebody else's.
        """
        try:
            found = json.loads((self.path / "identity.json").read_text())
            version, boot = int(found.pop("format")), found.pop("boot")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return False
        if version > INDEX_FORMAT:  # two versions at once must not throw away each other's
            raise StoreConfigError(
                f"index directory {self.path} is of format {version}, this version writes {INDEX_FORMAT}:"
                " set index_dir to another, or remove it once the newer version has ended"
            )
        if version < INDEX_FORMAT:
            return False
        IndexFiles(self.path, found, self._boot).require(self.identity)
        return (boot != "" and boot == self._boot()) or (self.path / "clean").exists()

    def sign(self) -> None:
        """Say that they are ours, of this boot. Raises OSError."""
        path = self.path / "identity.json"
        text = json.dumps({"format": INDEX_FORMAT, "boot": self._boot(), **self.identity}, indent=2) + "\n"
        if not path.exists() or path.read_text(errors="replace") != text:
            temporary = path.with_name(f"identity.json.{os.getpid()}")
            temporary.write_text(text)
            temporary.replace(path)

    def discard(self) -> None:
        """Remove what LMDB would open. Who has it open keeps it. Raises OSError."""
        for name in ("clean", "data.mdb", "lock.mdb"):
            with suppress(FileNotFoundError):
                (self.path / name).unlink()

    def reserve_lock(self, size: int) -> None:
        """Write `lock.mdb` full of zeros where there is none. LMDB maps it sparse: on a full disk the first use of one
        of its pages would kill the process. Not while this process has it open, for closing it once unlocks it.

        Raises:
            OSError: there is no room.
        """
        path = self.path / "lock.mdb"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not os.fstat(file).st_size and os.write(file, bytes(size)) < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(file)

    def identities(self) -> tuple[Identity, Identity]:
        """Tell one `data.mdb` and one `lock.mdb` from another; zeros where there is none."""
        return _identity(self.path / "data.mdb"), _identity(self.path / "lock.mdb")

    def are_a_pair(self) -> bool:
        """Whether data and lock are both there, or neither. One without the other must not be opened: who still has the
        lost one open would think itself alone."""
        return len({found == NO_FILE for found in self.identities()}) == 1

    def data_bytes(self) -> int:
        """Size of `data.mdb`. Raises OSError."""
        return os.stat(self.path / "data.mdb").st_size

    def mark_clean(self) -> None:
        """Say that everything is flushed. Raises OSError."""
        (self.path / "clean").touch()

    def unmark_clean(self) -> None:
        """Before a write: from now on a crash of the system may leave anything. Raises OSError."""
        try:
            (self.path / "clean").unlink()
        except FileNotFoundError:
            return
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
