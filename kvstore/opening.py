"""What is looked at, and made, before a store opens. Everything wrong here is one `StoreConfigError`."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from deepinfer_kvstore.backend import Backend
from deepinfer_kvstore.code import Code
from deepinfer_kvstore.descriptor import Descriptor
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.memory import MemoryBackend
from deepinfer_kvstore.native import cache_directory
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.ownership import require_same_owner
from deepinfer_kvstore.posix import PosixBackend
from deepinfer_kvstore.quota import Quota
from deepinfer_kvstore.stripe_set import StripeSet, open_set
from deepinfer_kvstore.usrbio import UsrbioBackend
from deepinfer_kvstore.whole_file import write_whole

_memory: dict[Path, MemoryBackend] = {}


class Places:
    """The paths of one namespace. What is not in slabs has replicas where there are several `roots`."""

    def __init__(self, roots: Sequence[Path], descriptor: Descriptor, stripe_set: StripeSet | None = None) -> None:
        """`roots`: where the namespace's journals and leases are."""
        self.roots = list(roots)
        self.stripe_set = stripe_set
        self.namespaces = [root / descriptor.directory for root in roots]
        self.namespace = self.namespaces[0]
        self.slabs = self.namespace / "slabs"
        """Where there is one root."""
        self.disks = [self.slabs]
        """All directories of slabs."""
        if stripe_set:
            self.disks = [root / descriptor.directory / "slabs" for root in stripe_set.present_roots]
        self.writers = [namespace / "writers" for namespace in self.namespaces]
        self.journals = [namespace / "journals" for namespace in self.namespaces]

    def disk_slot_bytes(self, slot_bytes: int) -> int:
        """Bytes that a slot takes on each disk."""
        return self.stripe_set.code.stored_bytes(slot_bytes) if self.stripe_set else slot_bytes

    def found(self, name: str) -> Path:
        """The first replica of a file that is there, else where the first should be."""
        return next((path for path in self._replicas(name) if os.path.exists(path)), self.namespace / name)

    def write(self, name: str, text: str, *, replace: bool = False) -> None:
        """Make the replicas of a file that are lacking, or with `replace` say something else. Raises OSError."""
        for path in self._replicas(name):
            if not path.exists() or (replace and path.read_bytes() != text.encode()):
                write_whole(path, text)

    def _replicas(self, name: str) -> list[Path]:
        return [namespace / name for namespace in self.namespaces]


def default_index_dir(root: Path) -> Path:
    """Where this user's indexes of the store at `root` are, on a local disk.

    Raises:
        StoreConfigError: this user has no home.
    """
    try:
        cache = cache_directory("deepinfer_kvstore")
    except RuntimeError as error:
        raise StoreConfigError("index_dir is not given, and this user has no home: give it, or set HOME") from error
    digest = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()
    return cache / digest[:16]


def prepare(root: Path, descriptor: Descriptor, options: StoreOptions) -> tuple[Places, Geometry]:
    """The namespace's directories and its geometry, made where they are not there yet.

    Raises:
        StoreConfigError: anything wrong with root, descriptor or options.
    """
    options.check()
    wanted = Geometry.of(descriptor.payload_bytes, options.slab_bytes, power_of_two=options.power_of_two_slots)
    places = _places(root, descriptor, options)
    if not options.read_only:
        _check_room(places, options)
        try:
            for namespace in places.namespaces:
                for path in (namespace, namespace / "writers", namespace / "slabs", namespace / "journals"):
                    path.mkdir(mode=0o700, exist_ok=True)  # blocks reveal prompts
                require_same_owner(namespace)
            places.write("geometry.json", json.dumps({"slot_bytes": wanted.slot_bytes}) + "\n")
            places.write("meta.json", descriptor.to_json())
            quota = Quota(options.capacity_bytes, wanted.slot_bytes, options.retention).to_json()
            places.write("quota.json", quota, replace=True)
        except OSError as error:
            raise StoreConfigError(f"root {root} cannot be written ({error}): check owner, mount and space") from error
    _check_meta(places.found("meta.json"), descriptor)
    slot_bytes = stored_slot_bytes(places)
    if slot_bytes != wanted.slot_bytes:
        raise StoreConfigError(
            f"{places.found('geometry.json')}: slots have {slot_bytes} bytes, these options make {wanted.slot_bytes}:"
            " open with the power_of_two_slots that the store was made with, or purge it"
        )
    return places, wanted


def open_backend(places: Places, geometry: Geometry, options: StoreOptions) -> Backend:
    """The back end that the options name."""
    if places.stripe_set:
        return _erasure(places.stripe_set, places.namespace.name, geometry, options)
    if options.backend == "memory":
        return _memory.setdefault(places.slabs.resolve(), MemoryBackend(options.capacity_bytes))
    return _directory(places.slabs, geometry, options)


def _directory(slabs: Path, geometry: Geometry, options: StoreOptions) -> Backend:
    if options.backend == "posix":
        return PosixBackend(slabs, geometry, direct=options.direct)
    threads = 1 if options.ec else options.io_threads  # a root of several has a thread to read with, one to write with
    return UsrbioBackend(slabs, geometry, threads=threads, timeout_seconds=options.io_timeout_s)


def check_space(places: Places, geometry: Geometry, backend: Backend) -> None:
    """Refuse a root that has neither slabs to read nor room for one.

    Raises:
        StoreConfigError: what is free, what is needed.
        OSError: the root cannot be read.
    """
    if not backend.names() and (free := backend.free_bytes()) < geometry.slab_bytes:
        raise StoreConfigError(
            f"root {places.roots[0]} has {free} bytes free, one slab takes {geometry.slab_bytes}:"
            " free some, or lower slab_bytes"
        )


def _erasure(stripe_set: StripeSet, namespace: str, geometry: Geometry, options: StoreOptions) -> Backend:
    from deepinfer_kvstore.erasure import ErasureBackend  # with it come numpy and zfec, for nobody else

    stored = Geometry(stripe_set.code.stored_bytes(geometry.slot_bytes), geometry.slab_slots)
    roots: list[tuple[str, Backend | None]] = []
    for root, present in zip(stripe_set.roots, stripe_set.present, strict=True):
        slabs = root / namespace / "slabs"
        if present and not options.read_only:
            with suppress(OSError):  # found out, and told, when it is used
                slabs.mkdir(mode=0o700, parents=True, exist_ok=True)
        roots.append((str(root), _directory(slabs, stored, options) if present else None))
    return ErasureBackend(
        roots, stripe_set.code, geometry, stripe_set.id, margin=options.ec_margin, timeout_seconds=options.io_timeout_s
    )


def _places(root: Path, descriptor: Descriptor, options: StoreOptions) -> Places:
    if not options.ec:
        if not root.is_dir():
            raise StoreConfigError(f"root {root} is not a directory: create it, or mount its file system")
        return Places([root], descriptor)
    if root != options.roots[0]:
        raise StoreConfigError(f"root {root} is not the first of roots, {options.roots[0]}: name that one")
    stripe_set = open_set(options.roots, Code.parse(options.ec), create=not options.read_only)
    return Places(stripe_set.control_roots, descriptor, stripe_set)


def _check_room(places: Places, options: StoreOptions) -> None:
    if options.backend == "memory":
        return
    found = os.statvfs(places.roots[0])
    room = found.f_blocks * found.f_frsize * (places.stripe_set.code.data if places.stripe_set else 1)
    if options.capacity_bytes > room:
        raise StoreConfigError(
            f"capacity_bytes is {options.capacity_bytes}, the file system of {places.roots[0]} has room for {room}:"
            " lower capacity_bytes"
        )


def _check_meta(path: Path, descriptor: Descriptor) -> None:
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise StoreConfigError(
            f"{path} does not exist: nothing of this model was stored here; open for writing first"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StoreConfigError(f"{path} cannot be read ({error}): check owner and mount") from error
    found = Descriptor.from_json(text, str(path))
    if found != descriptor:
        raise StoreConfigError(f"{path} describes another model or layout: remove its directory, or use another root")


def stored_slot_bytes(places: Places) -> int:
    """The slot size that the namespace was made with.

    Raises:
        StoreConfigError: its file does not say.
    """
    path = places.found("geometry.json")
    try:
        slot_bytes = json.loads(path.read_text())["slot_bytes"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreConfigError(
            f"{path} is not a geometry ({error!r}): remove its directory, or use another root"
        ) from error
    return int(slot_bytes) if isinstance(slot_bytes, int) else 0
