"""Making the root of a stripe set that was lost again, from the others, while the store is in use.

Engines go on without the root, and do not write to the new one before they are opened with it. So slabs that changed
meanwhile are copied again, and what is missed still is told by the writes its shards are of, like any old shard.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from deepinfer_kvstore.code import Code
from deepinfer_kvstore.erasure import ErasureBackend
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.posix import PosixBackend, PosixSlab
from deepinfer_kvstore.stripe_set import STRIPE_FILE, Stripe
from deepinfer_kvstore.whole_file import write_whole

REBUILD_FILE = "rebuild.json"
"""In a root that is being made: which one it is to be."""
RUN_BYTES = 4 << 20
PASSES = 3
"""Slabs that change are copied so many times at most."""
_NAMESPACE = re.compile("[0-9a-f]{16}")
_CONTROL = ("meta.json", "geometry.json", "quota.json", "writers/*.lease", "journals/*.log")


@dataclass
class Rebuilt:
    """What was made."""

    number: int
    """Of the root in its set, counted from 0."""
    namespaces: int = 0
    slabs: int = 0
    shards: int = 0
    unreadable: int = 0
    """Slots of which fewer than k good shards are left, those that were never written among them."""


Progress = Callable[[int, int], object]
"""Told how many slots are done, of how many."""


def rebuild(roots: Sequence[Path], onto: Path, progress: Progress, *, number: int | None = None) -> Rebuilt:
    """Make `onto` the lost root of the set that `roots` are of: number `number`, else the first that is not among them.

    Raises:
        StoreConfigError: `roots` are not k or more of one set, none is lost, or `onto` is not empty.
        OSError: a slot cannot be read just now, or `onto` cannot be written. May be done again.
    """
    stripes = _stripes(roots)
    stripe = stripes[0]
    lost = sorted(set(range(stripe.code.shards)) - {each.index for each in stripes})
    if not lost:
        raise StoreConfigError(f"all {stripe.code.shards} roots are named: leave out the one to make again")
    if number is not None and number not in lost:
        raise StoreConfigError(f"root number {number} is not lost: lost are {', '.join(map(str, lost))}")
    made = Stripe(stripe.set, lost[0] if number is None else number, stripe.data, stripe.parity)
    _begin(onto, made)
    there = {each.index: root for each, root in zip(stripes, roots, strict=True)}
    names = {path.name for root in roots for path in root.iterdir() if _NAMESPACE.fullmatch(path.name)}
    done = Rebuilt(made.index, len(names))
    for name in sorted(names):
        _Namespace(name, there, made, onto).rebuild(done, progress)
    made.write(onto)
    (onto / REBUILD_FILE).unlink()
    return done


class _Namespace:
    """One namespace of the root that is made."""

    def __init__(self, name: str, roots: dict[int, Path], made: Stripe, onto: Path) -> None:
        self._sources = [root / name for root in roots.values()]
        self._made = made
        self._onto = onto / name
        slot_bytes = self._slot_bytes()
        self._stored_bytes = made.code.stored_bytes(slot_bytes)
        self._run_slots = max(1, RUN_BYTES // slot_bytes)
        every: list[tuple[str, PosixBackend | None]] = []
        for index in range(made.code.shards):
            root = roots.get(index)
            backend = PosixBackend(root / name / "slabs", Geometry(self._stored_bytes, 1)) if root else None
            every.append((str(root or onto), backend))
        self._backend = ErasureBackend(every, made.code, Geometry(slot_bytes, 1), made.set)

    def rebuild(self, done: Rebuilt, progress: Progress) -> None:
        slabs = self._onto / "slabs"
        slabs.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = PosixBackend(slabs, Geometry(self._stored_bytes, 1))
        copied: dict[str, int] = {}
        with closing(self._backend):
            for _ in range(PASSES):
                found = self._changes()
                changed = {name: at for name, at in found.items() if copied.get(name) != at}
                if not changed:
                    break
                slots = {name: self._slots(name) for name in changed}
                before = 0
                for name in changed:
                    self._slab(target, name, slots[name], done, _from(progress, before, sum(slots.values())))
                    before += slots[name]
                copied.update(changed)
        for name in target.names():
            if name not in found:  # collected meanwhile
                target.remove(name)
        done.slabs += len(found)
        if self._made.index <= self._made.parity:
            self._copy_control_files()

    def _slab(
        self, target: PosixBackend, name: str, slots: int, done: Rebuilt, progress: Callable[[int], object]
    ) -> None:
        try:
            source = self._backend.open(name, write=False)
        except FileNotFoundError:  # collected
            return
        target.remove(name)
        with closing(source), closing(target.create(name, self._stored_bytes, slots)) as made:
            for first in range(0, slots, self._run_slots):
                count = min(self._run_slots, slots - first)
                restored = source.shards_for(self._made.index, first, count, _writer(made, first))
                done.shards += restored
                done.unreadable += count - restored
                progress(first + count)

    def _changes(self) -> dict[str, int]:
        """The slabs, and when each was last written to."""
        found: dict[str, int] = {}
        for source in self._sources:
            for path in (source / "slabs").glob("*.slab"):
                with suppress(FileNotFoundError):
                    found[path.name] = max(found.get(path.name, 0), path.stat().st_mtime_ns)
        return found

    def _slots(self, name: str) -> int:
        sizes = [0]
        for source in self._sources:
            with suppress(OSError):
                sizes.append((source / "slabs" / name).stat().st_size)
        return max(sizes) // self._stored_bytes

    def _slot_bytes(self) -> int:
        for source in self._sources:
            try:
                found = json.loads((source / "geometry.json").read_text())["slot_bytes"]
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                continue
            if isinstance(found, int) and found > 0:
                return found
        raise StoreConfigError(f"namespace {self._onto.name}: no root says how large its slots are: remove it")

    def _copy_control_files(self) -> None:
        for pattern in _CONTROL:
            for source in self._sources:
                for path in source.glob(pattern):
                    to = self._onto / path.relative_to(source)
                    if not to.exists() or to.stat().st_size < path.stat().st_size:
                        to.parent.mkdir(mode=0o700, exist_ok=True)
                        new = to.with_name(f".{to.name}-new")
                        shutil.copy2(path, new)
                        new.rename(to)


def _from(progress: Progress, before: int, total: int) -> Callable[[int], object]:
    return lambda slots: progress(before + slots, total)


def _writer(slab: PosixSlab, first_slot: int) -> Callable[[memoryview], None]:
    return lambda row: slab.writev(first_slot, [row])


def _stripes(roots: Sequence[Path]) -> list[Stripe]:
    found: list[Stripe] = []
    for root in roots:
        stripe = Stripe.read(root)
        if stripe is None:
            raise StoreConfigError(f"root {root} has no {STRIPE_FILE}: name only roots that are there")
        if found and (stripe.set, stripe.code) != (found[0].set, found[0].code):
            raise StoreConfigError(
                f"root {root} is of stripe set {stripe.set:016x}, {roots[0]} of {found[0].set:016x}: name roots of one"
            )
        if any(stripe.index == each.index for each in found):
            raise StoreConfigError(f"root {root} is number {stripe.index} of its set, as another named: name each once")
        found.append(stripe)
    if not found or len(found) < found[0].data:
        needed = found[0].data if found else Code(1, 1).data
        raise StoreConfigError(f"{len(found)} roots are named, {needed} are needed: name all that are there")
    return found


def _begin(onto: Path, made: Stripe) -> None:
    try:
        onto.mkdir(mode=0o700, exist_ok=True)
        names = set(os.listdir(onto)) - {"lost+found"}
        text = json.dumps(asdict(made)) + "\n"
        if names and (STRIPE_FILE in names or _read(onto / REBUILD_FILE) != text):
            raise StoreConfigError(f"{onto} is not empty: name an empty directory to make the root in")
        write_whole(onto / REBUILD_FILE, text)
    except OSError as error:
        raise StoreConfigError(f"{onto} cannot be written ({error}): check owner, mount and space") from error


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
