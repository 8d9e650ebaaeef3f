"""What is looked at, and made, before a store opens. Everything wrong here is one `StoreConfigError`."""

import hashlib
import json
import os
import secrets
from pathlib import Path

from deepinfer_kvstore.backend import Backend
from deepinfer_kvstore.descriptor import Descriptor
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.memory import MemoryBackend
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.posix import PosixBackend

_memory: dict[Path, MemoryBackend] = {}


class Places:
    """The paths of one namespace."""

    def __init__(self, root: Path, descriptor: Descriptor) -> None:
        self.root = root
        self.namespace = root / descriptor.directory
        self.meta = self.namespace / "meta.json"
        self.geometry = self.namespace / "geometry.json"
        self.writers = self.namespace / "writers"
        self.slabs = self.namespace / "slabs"
        self.journals = self.namespace / "journals"


def default_index_dir(root: Path) -> Path:
    """Where this user's indexes of the store at `root` are, on a local disk."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()
    return Path(cache) / "deepinfer_kvstore" / digest[:16]


def prepare(root: Path, descriptor: Descriptor, options: StoreOptions) -> tuple[Places, Geometry]:
    """The namespace's directories and its geometry, made where they are not there yet.

    Raises:
        StoreConfigError: anything wrong with root, descriptor or options.
    """
    options.check()
    places = Places(root, descriptor)
    wanted = Geometry.of(descriptor.payload_bytes, options.slab_bytes, power_of_two=options.power_of_two_slots)
    if not root.is_dir():
        raise StoreConfigError(f"root {root} is not a directory: create it, or mount its file system")
    if not options.read_only:
        _check_room(root, options)
        try:
            for path in (places.namespace, places.writers, places.slabs, places.journals):
                path.mkdir(mode=0o700, exist_ok=True)  # blocks reveal prompts
            if not places.geometry.exists():
                _write_whole(places.geometry, json.dumps({"slot_bytes": wanted.slot_bytes}) + "\n")
            if not places.meta.exists():
                _write_whole(places.meta, descriptor.to_json())
        except OSError as error:
            raise StoreConfigError(f"root {root} cannot be written ({error}): check owner, mount and space") from error
    _check_meta(places, descriptor)
    slot_bytes = _slot_bytes(places)
    if slot_bytes != wanted.slot_bytes:
        raise StoreConfigError(
            f"{places.geometry}: slots have {slot_bytes} bytes, these options make {wanted.slot_bytes}:"
            " open with the power_of_two_slots that the store was made with, or purge it"
        )
    return places, wanted


def open_backend(places: Places, geometry: Geometry, options: StoreOptions) -> Backend:
    """The back end that the options name."""
    if options.backend == "memory":
        return _memory.setdefault(places.slabs.resolve(), MemoryBackend(options.capacity_bytes))
    return PosixBackend(places.slabs, geometry, direct=options.direct)


def _check_room(root: Path, options: StoreOptions) -> None:
    if options.backend == "memory":
        return
    found = os.statvfs(root)
    if options.capacity_bytes > found.f_blocks * found.f_frsize:
        raise StoreConfigError(
            f"capacity_bytes is {options.capacity_bytes}, the file system of {root} has"
            f" {found.f_blocks * found.f_frsize}: lower capacity_bytes"
        )


def _check_meta(places: Places, descriptor: Descriptor) -> None:
    try:
        text = places.meta.read_text()
    except FileNotFoundError as error:
        raise StoreConfigError(
            f"{places.meta} does not exist: nothing of this model was stored here; open for writing first"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StoreConfigError(f"{places.meta} cannot be read ({error}): check owner and mount") from error
    found = Descriptor.from_json(text, str(places.meta))
    if found != descriptor:
        raise StoreConfigError(f"{places.meta} describes another model or layout: purge it, or use another root")


def _slot_bytes(places: Places) -> int:
    try:
        slot_bytes = json.loads(places.geometry.read_text())["slot_bytes"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreConfigError(f"{places.geometry} is not a geometry ({error!r}): purge the store") from error
    return int(slot_bytes) if isinstance(slot_bytes, int) else 0


def _write_whole(path: Path, text: str) -> None:
    """A file that is never seen half-written. The last of several at once stays; they write the same."""
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
        new.rename(path)
    finally:
        new.unlink(missing_ok=True)
