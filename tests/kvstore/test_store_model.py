"""Any sequence of puts, gets, deletions, crashes and restarts of two processes, against a dict.

What a get returns is what was put under that key, or a miss; and a miss only where something excuses it.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deepinfer_kvstore.store import Store
from store_case import SLAB_SLOTS, SLOT, get, key, open_store, payload, put

SLABS = 3
KEYS = 40
numbers = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=20, unique=True)
process = st.integers(0, 1)


def content(number: int, version: int) -> Callable[[int], bytes]:
    return lambda n: payload(n * 1000 + version)


class TwoProcesses(RuleBasedStateMachine):
    """Two stores on one root, each with an index of its own, as two nodes have."""

    @initialize()
    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.lives = 0
        self.versions: dict[int, set[int]] = {}
        """What was ever put under a key, and not surely deleted since."""
        self.sure: set[int] = set()
        """Keys of which some put succeeded, and no deletion was asked for since."""
        self.version = 0
        self.stores = [self._open(0), self._open(1)]

    def _open(self, number: int) -> Store:
        self.lives += 1
        return open_store(
            self.path, slabs=SLABS, io_timeout_s=0.02 if number else 10.0, index_dir=self.path / f"index{number}",
            direct="auto" if number else "off", run_bytes=4 * SLOT,
        )  # fmt: skip

    @rule(which=process, some=numbers)
    def put(self, which: int, some: list[int]) -> None:
        self.version += 1
        for number, ok in zip(some, put(self.stores[which], some, content(0, self.version), timeout_s=30), strict=True):
            if ok:
                self.versions.setdefault(number, set()).add(self.version)
                self.sure.add(number)

    @rule(which=process, some=numbers)
    def get(self, which: int, some: list[int]) -> None:
        assert self.stores[which].sync(30)
        buffers = get(self.stores[which], some)
        for number, found in zip(some, buffers, strict=True):
            allowed = {payload(number * 1000 + version) for version in self.versions.get(number, ())}
            assert found in allowed or found is None
            assert found is not None or number not in self.sure

    @rule(which=process, some=numbers)
    def delete(self, which: int, some: list[int]) -> None:
        assert all(store.sync(30) for store in self.stores)
        self.stores[which].delete([key(number) for number in some])
        self.sure -= set(some)
        assert all(store.sync(30) for store in (self.stores[which], *self.stores))
        assert self.stores[which].contains([key(number) for number in some]) == [False] * len(some)

    @rule(which=process)
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self._open(which)

    @rule(which=process, lose_index=st.booleans())
    def crash_of_the_system(self, which: int, lose_index: bool) -> None:
        """Both processes end where they are: the disk is as it is, and nobody says goodbye."""
        image = Path(tempfile.mkdtemp(prefix="store-model-"))
        shutil.copytree(self.path / "root", image / "root")
        for store in self.stores:
            store.close()
        if not lose_index:
            for name in ("index0", "index1"):
                shutil.copytree(self.path / name, image / name)
        shutil.rmtree(self.path / "root")
        shutil.move(image / "root", self.path / "root")
        if lose_index:
            for name in ("index0", "index1"):
                shutil.rmtree(self.path / name)
        shutil.rmtree(image)
        self.stores = [self._open(0), self._open(1)]

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        for store in getattr(self, "stores", ()):
            slots = store._held().slots
            free, taken, resting = slots.counts()
            assert free + taken + resting == SLAB_SLOTS * len(slots.slabs())
            assert len(slots.slabs()) <= SLABS

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close()
        if hasattr(self, "path"):
            shutil.rmtree(self.path)


TestTwoProcesses = TwoProcesses.TestCase
TestTwoProcesses.settings = settings(max_examples=20, stateful_step_count=25)
