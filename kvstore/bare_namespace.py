"""A namespace as an operator's command opens it: its index, journals and slabs, without engine, daemon or capacity."""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from deepinfer_kvstore.compaction import Compactor
from deepinfer_kvstore.descriptor import Descriptor
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.header import Seal
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.inspection import Inspector
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.network_fs import file_system_type, is_network
from deepinfer_kvstore.opening import Places, default_index_dir, open_backend, stored_slot_bytes
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.ownership import require_same_owner
from deepinfer_kvstore.record import Record
from deepinfer_kvstore.stripe_set import existing_set
from deepinfer_kvstore.writer import Claims

LEASE_SECONDS = 30.0
"""As engines have it by default: on shared storage a lease untouched for so long is a dead writer's."""
_NAME = re.compile("[0-9a-f]{16}")
_MAX_META_BYTES = 1 << 20
_NO_SLABS = Geometry(0, 0)
"""Identities are taken over by others of their geometry, so those that own slabs are left alone."""


class BareNamespace:
    """One namespace, opened by `opened`. Not thread-safe."""

    def __init__(self, places: Places, descriptor: Descriptor, root: Path, index_dir: Path) -> None:
        """`root` is the one that engines name.

        Raises:
            StoreConfigError: no slot size, or no place for the index.
        """
        self.name = descriptor.directory
        self.descriptor = descriptor
        self.places = places
        self.slot_bytes = stored_slot_bytes(places)
        self.shared = any(is_network(file_system_type(place)) for place in places.roots)
        self.index = Index.open(index_dir / self.name, descriptor.digest(), root=str(root.resolve()))
        self._journals = JournalSet(places.journals, descriptor.digest())

    def sync(self) -> None:
        """Apply what is new in the journals."""
        self.index.sync(self._journals)

    @contextmanager
    def appending(self) -> Iterator[Callable[[Sequence[Record]], None]]:
        """A function that appends to the journals, under an identity claimed for the time.

        Raises:
            StoreConfigError: the namespace is another user's, whose engines could not read this journal.
            OSError: the root cannot be written; from the function too, when not all records are in the journal.
        """
        require_same_owner(self.places.namespace)
        claims = Claims(
            self.places.writers, self.places.journals, self.descriptor.digest(), _NO_SLABS,
            lease_s=LEASE_SECONDS, shared=self.shared,
        )  # fmt: skip
        for directory in (*self.places.writers, *self.places.journals):  # they may be what was lost
            directory.mkdir(mode=0o700, exist_ok=True)
        writer = claims.claim()

        def append(records: Sequence[Record]) -> None:
            writer.beat()
            if not writer.held() or writer.journal.append(records) < len(records):
                raise OSError(f"journal {writer.journal.name} takes no more records")

        try:
            yield append
            compactor = Compactor(writer.journal, self.index, writer.held)
            if compactor.worthwhile():  # identities are used again, and each use leaves a file
                compactor.compact()
        finally:
            writer.release()

    @contextmanager
    def inspector(self, secret: bytes | None) -> Iterator[Inspector]:
        """Reads the slabs.

        Raises:
            StoreConfigError: a secret of the wrong length.
        """
        seal = Seal(self.descriptor.digest(), secret)
        with ExitStack() as closing:
            backend = open_backend(self.places, Geometry(self.slot_bytes, 1), StoreOptions(read_only=True))
            closing.callback(backend.close)
            yield Inspector(backend, self.slot_bytes, self.slabs, self.index, seal, self.sync)

    def slabs(self) -> dict[str, int]:
        """Slabs and their numbers of slots.

        Raises:
            OSError: no directory of slabs can be read.
        """
        found: dict[str, int] = {}
        failures: list[OSError] = []
        disk_slot_bytes = self.places.disk_slot_bytes(self.slot_bytes)
        for directory in self.places.disks:
            try:
                for path in sorted(directory.iterdir()):
                    with suppress(FileNotFoundError):  # collected
                        if path.suffix == ".slab":
                            slots = path.stat().st_size // disk_slot_bytes
                            found[path.name] = max(slots, found.get(path.name, 0))
            except OSError as error:
                failures.append(error)
        if len(failures) == len(self.places.disks):
            raise failures[0]
        return found

    def remove_files(self) -> None:
        """Remove a namespace that nobody writes to, and this node's index of it. It is closed afterwards.

        Raises:
            OSError: something is left.
        """
        index_path = self.index.path
        self.close()
        for directory in {*self.places.namespaces, *(disk.parent for disk in self.places.disks)}:
            shutil.rmtree(directory)
        shutil.rmtree(index_path)

    def close(self) -> None:
        """Idempotent."""
        self._journals.close()
        self.index.close()


@contextmanager
def opened(
    roots: Sequence[Path], index_dir: Path | None = None, name: str | None = None
) -> Iterator[list[BareNamespace]]:
    """The namespaces of a store, or the one of that name, with indexes up to date. Closed at the end.

    `roots`: one, or all of an erasure-coded store in their order.

    Raises:
        StoreConfigError: no such directory or namespace, one that cannot be read, or no place for the index.
    """
    stripe_set = existing_set(roots)
    control = stripe_set.control_roots if stripe_set else list(roots)
    names = _names(control)
    descriptors = _descriptors(control, names if name is None else names & {name})
    chosen = sorted(descriptors)
    if not chosen:
        have = ", ".join(sorted(names)) or "none"
        raise StoreConfigError(f"root {roots[0]} has no namespace{f' {name}' if name else ''}: it has {have}")
    found: list[BareNamespace] = []
    try:
        for each in chosen:
            places = Places(control, descriptors[each], stripe_set)
            found.append(BareNamespace(places, descriptors[each], roots[0], index_dir or default_index_dir(roots[0])))
            found[-1].sync()
        yield found
    finally:
        for namespace in found:
            namespace.close()


def _names(roots: Sequence[Path]) -> set[str]:
    found: set[str] = set()
    for root in roots:
        if not root.is_dir():
            raise StoreConfigError(f"root {root} is not a directory: create it, or mount its file system")
        try:
            found.update(path.name for path in root.iterdir() if _NAME.fullmatch(path.name))
        except OSError as error:
            raise StoreConfigError(f"root {root} cannot be read ({error}): check owner and mount") from error
    return found


def _descriptors(roots: Sequence[Path], names: Iterable[str]) -> dict[str, Descriptor]:
    found: dict[str, Descriptor] = {}
    for root in roots:
        for name in names:
            meta = root / name / "meta.json"
            try:
                with meta.open("rb") as file:
                    descriptor = Descriptor.from_json(file.read(_MAX_META_BYTES).decode(), str(meta))
            except FileNotFoundError:  # its engine is just making it
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise StoreConfigError(f"{meta} cannot be read ({error}): check owner and mount") from error
            if descriptor.directory != name:
                raise StoreConfigError(f"{meta} describes {descriptor.directory}: remove the directory or put it back")
            found[name] = descriptor
    return found
