"""Rounds of one shape: each contest of a round is run by every contender in turn, so that the disk's moods meet all."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv.contender import Contender, Request, Rows, Shape, drop_page_cache
from kv.fs_tier import FsTier
from kv.raw_file import RawCalls, RawFile
from kv.slab_store import SlabStore

Times = dict[str, dict[str, float]]
"""By contender: seconds by the clock, and of processor time."""


@dataclass(frozen=True)
class Contest:
    """One operation in one state of the caches. Its name is the key of results."""

    name: str
    contenders: dict[str, Contender]
    operation: str
    prepare: Callable[[Contender, Sequence[Request]], None]


def measure(directory: Path, shape: Shape, rounds: int, threads: int) -> dict[str, list[Times]]:
    """Times of every contest, one entry a round; a round before them, which warms up, is not in them.

    `directory` is empty, and what is written there stays.
    """
    rows = Rows(shape.payload_bytes, shape.requests * shape.blocks)
    root = directory / "store"
    root.mkdir()
    with ExitStack() as stack:

        def opened(contender: Any) -> Any:
            stack.callback(contender.close)
            return contender

        # The second store reads what the first one stored; raw files share nothing.
        store, cached_store = (opened(SlabStore(root, rows, direct=d, threads=threads)) for d in ("auto", "off"))
        file, cached_file = (opened(RawFile(directory / f"raw-{d}", rows, direct=d)) for d in (True, False))
        raw, cached_raw = (opened(RawCalls(f, shape.requests)) for f in (file, cached_file))
        raw_all, cached_raw_all = (opened(RawCalls(f, threads)) for f in (file, cached_file))
        new_fs, aged_fs = (opened(FsTier(directory / name, rows)) for name in ("fs", "fs_aged"))
        direct = {"store": store, "fs": new_fs, "fs_aged": aged_fs, "raw": raw, "raw_all": raw_all}
        cached = {"store": cached_store, "raw": cached_raw, "raw_all": cached_raw_all}
        cached_raw.store(list(_requests(shape, 0)))
        drop_page_cache(cached_raw.files())
        found: dict[str, list[Times]] = {}
        for number in range(rounds + 1):
            requests = list(_requests(shape, number))
            for contest in _contests(direct, cached):
                times = _turn(contest, requests, rows, first=number)
                if number:
                    found.setdefault(contest.name, []).append(times)
        return found


def _contests(direct: dict[str, Any], cached: dict[str, Contender]) -> Iterator[Contest]:
    def nothing(contender: Contender, requests: Sequence[Request]) -> None:
        pass

    def age(contender: Contender, requests: Sequence[Request]) -> None:
        if contender is direct["fs_aged"]:
            direct["fs_aged"].make_directories(requests)

    yield Contest("store", direct, "store", age)
    yield Contest("load", {name: direct[name] for name in direct if name != "fs_aged"}, "load", nothing)
    yield Contest("load, cold", cached, "load", lambda contender, _: drop_page_cache(contender.files()))
    yield Contest("load, page cache", cached, "load", lambda contender, requests: contender.load(requests))


def _turn(contest: Contest, requests: list[Request], rows: Rows, first: int) -> Times:
    """Everyone's time for one contest; who is first changes from round to round."""
    names, times = list(contest.contenders), {}
    first %= len(names)
    for name in names[first:] + names[:first]:
        contender = contest.contenders[name]
        contest.prepare(contender, requests)
        rows.clear()
        run = getattr(contender, contest.operation)
        clock, processor = time.perf_counter(), time.process_time()
        run(requests)
        times[name] = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}
        if contest.operation == "load":
            rows.check(name)
    return times


def _requests(shape: Shape, number: int) -> Iterator[Request]:
    """Blocks that nobody has stored yet, for every number."""
    for request in range(shape.requests):
        names = (f"{number} {request} {block}".encode() for block in range(shape.blocks))
        yield Request([hashlib.sha256(name).digest() for name in names], request * shape.blocks)
