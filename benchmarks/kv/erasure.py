"""The erasure-coded store beside the plain one: rates, a slow root, lost roots."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer_kvstore.backend import Backend, Buffers, Slab
from kv.contender import Request, Rows, drop_page_cache
from kv.slab_store import SlabStore

ROOTS = 12
CODE = "10+2"
SLOW_BLOCKS = 16
"""Of a request whose latency is measured: 2,048 tokens of V4.1 on SM100."""
TURN = 25
"""Such requests in a row, before the root is slowed, or quick again."""


class SlowRoot:
    """A root that answers each read `delay_seconds` late, and else as the one it takes the place of."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.delay_seconds = 0.0

    def open(self, name: str, *, write: bool) -> Slab:
        return _SlowSlab(self, self._backend.open(name, write=write))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _SlowSlab:
    """Without the ways to read that need no thread: they would not be late."""

    def __init__(self, root: SlowRoot, slab: Slab) -> None:
        self._root, self._slab = root, slab
        self.writev, self.punch, self.sync, self.close = slab.writev, slab.punch, slab.sync, slab.close
        self.name, self.slot_bytes, self.slots = slab.name, slab.slot_bytes, slab.slots

    def readv(self, first_slot: int, buffers: Buffers) -> None:
        time.sleep(self._root.delay_seconds)
        self._slab.readv(first_slot, buffers)


def rates(
    directory: Path, payload_bytes: int, requests: int, blocks: int, rounds: int, *, direct: str
) -> dict[str, dict[str, list[float]]]:
    """Seconds of stores and loads of `requests` requests at once, for "plain" and "ec", one of each a round.

    A round before them, which warms up, is not in them. Page caches are warm where `direct` is "off".
    """
    rows = Rows(payload_bytes, requests * blocks)
    found: dict[str, dict[str, list[float]]] = {"store": {"plain": [], "ec": []}, "load": {"plain": [], "ec": []}}
    with stores(directory, rows, direct) as contenders:
        for number in range(rounds + 1):
            wanted = list(_requests(requests, blocks, number))
            names = list(contenders)[:: 1 if number % 2 else -1]
            for name in names:
                _timed(found["store"][name], number, contenders[name].store, wanted)
                drop_page_cache(contenders[name].files())
            for name in names:
                if direct == "off":
                    contenders[name].load(wanted)
                rows.clear()
                _timed(found["load"][name], number, contenders[name].load, wanted)
                rows.check(name)
    return found


def latencies(directory: Path, payload_bytes: int, turns: int, delay_seconds: float) -> dict[str, list[float]]:
    """Seconds of requests of `SLOW_BLOCKS` blocks, one at a time: "quick", and "slowed" where one root is."""
    rows = Rows(payload_bytes, SLOW_BLOCKS * TURN)
    wanted = list(_requests(TURN, SLOW_BLOCKS, 0))
    found: dict[str, list[float]] = {"quick": [], "slowed": []}
    with stores(directory, rows, "auto", ec_only=True) as contenders:
        store = contenders["ec"]
        lane = store.backend.lanes[3]
        slow = lane.backend = SlowRoot(lane.backend)
        store.store(wanted)
        drop_page_cache(store.files())
        for turn in range(turns + 1):
            for name, seconds in (("quick", 0.0), ("slowed", delay_seconds)):
                slow.delay_seconds = seconds
                if not seconds:
                    _become_quick(store, wanted, lane)
                for request in wanted:
                    _timed(found[name], turn, store.load, [request])
    return found


def removed(directory: Path, payload_bytes: int, blocks: int) -> bool:
    """Whether every byte is right with two of the roots' directories removed. Raises RuntimeError where not."""
    rows = Rows(payload_bytes, blocks)
    wanted = list(_requests(1, blocks, 0))
    with stores(directory, rows, "auto", ec_only=True) as contenders:
        contenders["ec"].store(wanted)
    for number in (0, 7):
        shutil.rmtree(directory / f"root{number}")
    rows.clear()
    with stores(directory, rows, "auto", ec_only=True) as contenders:
        contenders["ec"].load(wanted)
    rows.check("two roots removed")
    return True


@contextmanager
def stores(directory: Path, rows: Rows, direct: str, *, ec_only: bool = False) -> Iterator[dict[str, SlabStore]]:
    """The plain store and the coded one, in the same directory."""
    roots = [directory / f"root{number}" for number in range(ROOTS)]
    if not any(root.exists() for root in roots):
        for root in [*roots, directory / "plain" / "root"]:
            root.mkdir(parents=True)
    opened = {"ec": SlabStore(roots[0], rows, direct=direct, threads=8, ec=CODE, roots=tuple(roots))}
    if not ec_only:
        opened["plain"] = SlabStore(directory / "plain" / "root", rows, direct=direct, threads=8)
    try:
        yield opened
    finally:
        for store in opened.values():
            store.close()


def _become_quick(store: SlabStore, wanted: Sequence[Request], lane: Any) -> None:
    """Read until the root that was slow is found quick again."""
    while lane.is_slow(store.backend.late_seconds()):
        store.load(wanted[:1])
        time.sleep(0.05)


def _requests(requests: int, blocks: int, number: int) -> Iterator[Request]:
    for request in range(requests):
        names = (f"{number} {request} {block}".encode() for block in range(blocks))
        yield Request([hashlib.sha256(name).digest() for name in names], request * blocks)


def _timed(times: list[float], number: int, run: Callable[[list[Request]], None], requests: list[Request]) -> None:
    began = time.perf_counter()
    run(requests)
    if number:
        times.append(time.perf_counter() - began)
