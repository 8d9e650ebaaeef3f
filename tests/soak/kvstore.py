"""Processes put, get, pin, collect and die on one small store whose files are damaged meanwhile; any wrong byte fails.

What a block holds follows from its key, so every reader can tell. Writers and a daemon are killed with -9 at random and
started again; bits of slabs and journals are flipped, journals torn, slabs and indexes removed, small files filled with
noise. Blocks may be missed, and never be wrong; disk use keeps to its limit; no process ends by itself.

Example: python tests/soak/kvstore.py --minutes 5
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_kvstore.daemon import DaemonOptions, serve
from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.retention import Retention
from deepinfer_kvstore.store import Put, Store

PAYLOAD_BYTES = 7000
SLAB_BYTES = 512 << 10
SLABS = 24
CAPACITY_BYTES = SLABS * SLAB_BYTES
CHAINS = 200
CHAIN_BLOCKS = 40
BLOCK_TOKENS = 64
WRONG = 3
"""Exit code of a process that has read a wrong byte."""

DESCRIPTOR = Descriptor(
    model="soak", weights="1", kv_dtype="u8", record_format="soak", layout="soak", hash_algorithm="sha256_cbor",
    none_hash="00" * 32, hash_tokens=BLOCK_TOKENS, shards="1", groups=(Group(1, BLOCK_TOKENS, PAYLOAD_BYTES),),
)  # fmt: skip


def key_of(chain: int, block: int) -> Key:
    """The key of a block."""
    return make_key(1, hashlib.sha256(f"{chain}/{block}".encode()).digest())


def bytes_of(key: Key) -> bytes:
    """What the block of `key` holds."""
    return hashlib.shake_128(key).digest(PAYLOAD_BYTES)


def options(index_dir: Path) -> StoreOptions:
    """Small slabs, short times."""
    return StoreOptions(
        capacity_bytes=CAPACITY_BYTES,
        slab_bytes=SLAB_BYTES,
        index_dir=index_dir,
        io_threads=2,
        io_timeout_s=1.0,
        lease_s=2.0,
        touch_interval_s=0.5,
        retention=Retention(ttl={"brief": 5}, expired_per_hour=1000),
    )


class Worker:
    """One engine's worth of reads and writes, until SIGTERM."""

    def __init__(self, root: Path, index_dir: Path, out: Path, seed: int) -> None:
        self.root = root
        self.index_dir = index_dir
        self.out = out
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.ending = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "ending", True))

    def run(self) -> None:
        """Open the store, work, close it; now and then again."""
        while not self.ending:
            store = Store.open(self.root, DESCRIPTOR, options(self.index_dir))
            until = time.monotonic() + self.random.uniform(2, 20)
            while time.monotonic() < until and not self.ending:
                self.request(store)
                self.report(store)
            store.close()
            self.counts = self.report(store)

    def request(self, store: Store) -> None:
        """As an engine: load the prefix that is there, store the rest, say what was used."""
        chain = min(int(self.random.expovariate(8 / CHAINS)), CHAINS - 1)
        keys = [key_of(chain, block) for block in range(self.random.randint(1, CHAIN_BLOCKS))]
        held = store.longest_prefix(keys)
        if self.random.random() < 0.1:
            store.pin(keys[:held], 1.0)
        loaded = self.load(store, keys[:held])
        ttl_class = self.random.choice(("agent", "chat", "brief", "none"))
        store.touch(keys[:loaded], ttl_class)
        puts = [
            Put(
                key, memoryview(bytes_of(key)), keys[block - 1][2:10] if block else bytes(8), BLOCK_TOKENS * (block + 1)
            )
            for block, key in enumerate(keys)
            if block >= loaded
        ]
        transfer = store.put(puts, ttl_class=ttl_class, tenant=f"tenant-{chain % 5}")
        if not transfer.wait(30):
            raise TimeoutError("a put did not end in 30 s")
        self.counts.update(stored=sum(transfer.results()), requests=1)
        if self.random.random() < 0.01:
            store.delete(keys[-2:])
        time.sleep(self.random.uniform(0, 0.02))

    def load(self, store: Store, keys: list[Key]) -> int:
        """Load and compare; how many blocks from the first on were right."""
        buffers = [bytearray(b"\xee" * PAYLOAD_BYTES) for _ in keys]
        transfer = store.get(keys, [memoryview(buffer) for buffer in buffers])
        if not transfer.wait(30):
            raise TimeoutError("a get did not end in 30 s")
        results = transfer.results()
        for key, buffer, ok in zip(keys, buffers, results, strict=True):
            if ok and buffer != bytes_of(key):
                print(f"block {key.hex()} is wrong", file=sys.stderr)
                os._exit(WRONG)
        self.counts.update(hits=results.count(True), promised=len(results))
        return results.index(False) if False in results else len(results)

    def report(self, store: Store) -> Counter[str]:
        """Leave the sums where the parent finds them, even if this process is killed."""
        stats = store.stats()
        sums = self.counts.copy()
        for what, counts in (("evicted", stats.evicted), ("missed", stats.misses), ("dropped", stats.dropped)):
            sums.update({f"{what} ({reason})": count for reason, count in counts.items()})
        new = self.out.with_suffix(".new")
        new.write_text(json.dumps(sums))
        new.rename(self.out)
        return sums


@dataclass
class Soak:
    """The processes, numbered from 0, and what is done to them and their files."""

    root: Path
    scratch: Path
    writers: int
    random: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    running: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    started: int = 0
    most_slab_bytes: int = 0

    def start(self, number: int) -> None:
        """Start writer `number`, or the daemon in place of the last. They share two indexes, as on two nodes."""
        self.started += 1
        self.starts[number] = self.started
        place = [str(self.root), str(self.index(number))]
        out, seed = str(self.out(number)), str(self.random.getrandbits(32))
        role = ["--daemon", *place] if number == self.writers else ["--worker", *place, out, seed]
        with (self.scratch / f"{self.started}.err").open("w") as errors:
            self.running[number] = subprocess.Popen([sys.executable, __file__, *role], stderr=errors, text=True)

    def out(self, number: int) -> Path:
        """Where process `number` leaves its sums."""
        return self.scratch / f"{self.starts[number]}.json"

    def index(self, number: int) -> Path:
        """The index directory of writer `number`."""
        return self.scratch / f"index-{number % 2}"

    def namespace(self, kind: str, pattern: str) -> list[Path]:
        """Files of the store."""
        return sorted((self.root / DESCRIPTOR.directory / kind).glob(pattern))

    def run(self, seconds: float) -> None:
        """Harm what there is until the time is over.

        Raises:
            SystemExit: a process ended by itself, or too much disk is used.
        """
        harms: list[tuple[Callable[[], None], int]] = [
            (self.kill, 6), (self.flip_slab, 12), (self.flip_journal, 3), (self.tear_journal, 2),
            (self.remove_slab, 1), (self.remove_index, 1), (self.fill_with_noise, 1),
        ]  # fmt: skip
        began = shown = time.monotonic()
        for number in range(self.writers + 1):
            self.start(number)
        while time.monotonic() - began < seconds:
            time.sleep(self.random.uniform(0.05, 0.5))
            (harm,) = self.random.choices([harm for harm, _ in harms], [weight for _, weight in harms])
            harm()
            self.look()
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(f"{shown - began:5.0f} s {self.summary()}", flush=True)
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for number, process in self.running.items():
            process.wait(60)
            self.ended(number, process)

    def look(self) -> None:
        """Hold the processes and the disk to what is promised."""
        for number, process in list(self.running.items()):
            if process.poll() is not None:
                self.ended(number, process)
                sys.exit(f"soak: process {number} ended by itself")
        used = len(self.namespace("slabs", "*.slab")) * SLAB_BYTES
        self.most_slab_bytes = max(self.most_slab_bytes, used)
        if used > CAPACITY_BYTES:
            sys.exit(f"soak: slabs take {used} bytes of {CAPACITY_BYTES}")

    def ended(self, number: int, process: subprocess.Popen[str]) -> None:
        """Accept an end that was asked for.

        Raises:
            SystemExit: it says why the process ended.
        """
        if process.returncode not in (0, -signal.SIGKILL, -signal.SIGTERM):  # the last while it started
            errors = "".join(path.read_text() for path in sorted(self.scratch.glob("*.err")))
            sys.exit(f"soak: process {number} ended with {process.returncode}\n{errors[-4000:]}")

    def kill(self) -> None:
        number = self.random.randrange(self.writers + 1)
        process = self.running[number]
        if number < self.writers and not self.out(number).exists():  # on a busy machine it would never come to anything
            return
        process.kill()
        process.wait()
        self.ended(number, process)
        self.counts["killed"] += 1
        self.start(number)

    def flip_slab(self) -> None:
        self.flip(self.namespace("slabs", "*.slab"), "slab bits")

    def flip_journal(self) -> None:
        self.flip(self.namespace("journals", "*.log"), "journal bits")

    def flip(self, paths: list[Path], what: str) -> None:
        if not paths:
            return
        try:
            with self.random.choice(paths).open("r+b") as file:
                at = self.random.randrange(max(1, os.fstat(file.fileno()).st_size))
                byte = os.pread(file.fileno(), 1, at) or b"\0"
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << self.random.randrange(8)]), at)
        except FileNotFoundError:
            return
        self.counts[what] += 1

    def tear_journal(self) -> None:
        """What a writer that died in the middle of a record leaves, or one on a file system that lost its end."""
        paths = self.namespace("journals", "*.log")
        if paths:
            with self.random.choice(paths).open("ab") as file:
                file.write(self.random.randbytes(self.random.randint(1, 200)))
            self.counts["torn journals"] += 1

    def remove_slab(self) -> None:
        paths = self.namespace("slabs", "*.slab")
        if paths:
            self.random.choice(paths).unlink(missing_ok=True)
            self.counts["slabs removed"] += 1

    def remove_index(self) -> None:
        shutil.rmtree(self.index(self.random.randrange(2)), ignore_errors=True)
        self.counts["indexes removed"] += 1

    def fill_with_noise(self) -> None:
        """The lease of collection or the quota: what nothing but speed may depend on."""
        path = self.root / DESCRIPTOR.directory / self.random.choice(("gc.lease", "quota.json"))
        if path.exists():
            path.write_bytes(self.random.randbytes(self.random.randint(0, 100)))
            self.counts["noise"] += 1

    def summary(self) -> str:
        """Sums of all writers, and of what was done to them."""
        sums = Counter(self.counts)
        for path in self.scratch.glob("*.json"):
            sums.update(json.loads(path.read_text()))
        sums["most MiB on disk"] = self.most_slab_bytes >> 20
        return ", ".join(f"{name} {count}" for name, count in sorted(sums.items()))


def verify(root: Path, scratch: Path) -> tuple[int, int]:
    """Read every block that a new index knows: how many are right, and how many are missed.

    Raises:
        SystemExit: one is wrong.
    """
    store = Store.open(root, DESCRIPTOR, options(scratch / "index-last"))
    worker = Worker(root, scratch, scratch / "last.json", 0)
    after: Key | None = None
    while found := store.index.entries(after, 256):
        worker.load(store, [key for key, _ in found])
        after = found[-1][0]
    store.close()
    return worker.counts["hits"], worker.counts["promised"] - worker.counts["hits"]


def main() -> None:
    """Soak, print a summary; exit code 1 for anything that must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--writers", type=int, default=3, help="processes that read and write (default: 3)")
    parser.add_argument("--seed", type=int, default=None, help="of the harm that is done (default: another each time)")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--daemon", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        root, index_dir, out, seed = args.worker
        Worker(Path(root), Path(index_dir), Path(out), int(seed)).run()
        return
    if args.daemon:
        root, index_dir = map(Path, args.daemon)
        serve(DaemonOptions(root, roles=("index", "gc"), index_dir=index_dir), lambda _: None)
        return
    if args.minutes <= 0 or args.writers < 1:
        parser.error("--minutes must be above 0 and --writers at least 1")
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as directory:
        root, scratch = Path(directory, "root"), Path(directory, "scratch")
        root.mkdir()
        scratch.mkdir()
        soak = Soak(root, scratch, args.writers, random.Random(seed))
        try:
            soak.run(args.minutes * 60)
            right, missed = verify(root, scratch)
        finally:
            for process in soak.running.values():
                process.kill()
        print(f"{soak.summary()}, right at the end {right}, missed at the end {missed}")
        print("no byte was wrong")


if __name__ == "__main__":
    main()
