"""How a store is opened. Every value is checked at open."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from deepinfer_kvstore.code import Code
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.header import SECRET_BYTES
from deepinfer_kvstore.posix import Direct
from deepinfer_kvstore.retention import Retention

BACKENDS = ("posix", "usrbio", "memory")


@dataclass(frozen=True)
class StoreOptions:
    """Options of one process; what all processes must agree on is the descriptor and `power_of_two_slots`."""

    capacity_bytes: int = 0
    """Bytes that the namespace may take on the root, all writers together. Must be given, unless `read_only`."""
    index_dir: Path | None = None
    """Local directory of indexes. Default: below `$XDG_CACHE_HOME`, else `~/.cache`, by the root's path."""
    backend: str = "posix"
    """posix (a local disk or a 3FS mount), usrbio (3FS past its FUSE client) or memory (ends with the process)."""
    slab_bytes: int = 1 << 30
    """Size of one slab file, reserved when it is made."""
    ec: str = ""
    """Erasure code "k+m" over `roots`, as "10+2"; empty: one root, no code."""
    roots: tuple[Path, ...] = ()
    """With `ec`, the k + m roots in their order; the store's root is the first of them."""
    ec_margin: int = 0
    """A write succeeds when k + `ec_margin` roots have it. More than 0: with m roots lost, nothing is stored."""
    power_of_two_slots: bool = False
    """Slots as large as 3FS chunks, so that 3FS takes the space of a collected slot back."""
    direct: Direct = "auto"
    """O_DIRECT: auto (where the file system can), on (an error where it cannot), off."""
    io_threads: int = 8
    """Threads that read and write; at most half of them write."""
    run_bytes: int = 4 << 20
    """Most bytes in one read or write call."""
    max_inflight_bytes: int = 256 << 20
    """Most bytes of puts under way; more are dropped at once, for their memory is the caller's."""
    io_timeout_s: float = 10.0
    """Deadline of a put or get that names none."""
    breaker_failures: int = 5
    """Failed reads (or writes) in a row after which every get is a miss (every put is dropped) for a pause."""
    breaker_pause_s: float = 10.0
    """Seconds between two probes of a failing disk."""
    secret: bytes | None = None
    """32 bytes that writers and readers share: blocks whose MAC does not prove it are misses."""
    lease_s: float = 30.0
    """Silence after which a writer on shared storage is dead and its slabs may be adopted."""
    sync_interval_s: float = 0.2
    """Pause between two looks at the journals of other writers."""
    fsync: bool = False
    """Wait for the disk before a block becomes visible. A cache need not: what a power loss tears is a miss."""
    touch_interval_s: float = 5.0
    """How long uses of blocks are gathered in memory before they are written down."""
    retention: Retention = field(default_factory=Retention)
    """How long blocks are kept, and how full the store may be."""
    collect_interval_s: float | None = 1.0
    """How often this process looks whether there is something to collect, if no other has the lease. None: never."""
    read_only: bool = False
    """Only get: no identity, nothing written to the root."""

    def check(self) -> None:
        """Refuse values that cannot work.

        Raises:
            StoreConfigError: which, its value, its limit.
        """
        if self.backend not in BACKENDS:
            raise StoreConfigError(f"backend {self.backend!r}: there are {', '.join(BACKENDS)}")
        if self.ec or self.roots:
            self._check_code()
        if self.direct not in get_args(Direct):
            raise StoreConfigError(f"direct {self.direct!r}: it is auto, on or off")
        if self.secret is not None and len(self.secret) != SECRET_BYTES:
            raise StoreConfigError(f"secret has {len(self.secret)} bytes, it must have {SECRET_BYTES}")
        for name, least in (("io_threads", 1), ("run_bytes", 1), ("max_inflight_bytes", 1), ("breaker_failures", 1)):
            if (value := getattr(self, name)) < least:
                raise StoreConfigError(f"{name} is {value}, it must be at least {least}")
        for name in (
            "io_timeout_s",
            "breaker_pause_s",
            "lease_s",
            "sync_interval_s",
            "touch_interval_s",
            "collect_interval_s",
        ):
            if (seconds := getattr(self, name)) is not None and not seconds > 0:
                raise StoreConfigError(f"{name} is {seconds}, it must be more than 0 seconds")
        if not self.read_only and self.capacity_bytes < self.slab_bytes:
            raise StoreConfigError(
                f"capacity_bytes is {self.capacity_bytes}, one slab takes {self.slab_bytes}:"
                " raise capacity_bytes or lower slab_bytes"
            )

    def _check_code(self) -> None:
        code = Code.parse(self.ec)
        if len(self.roots) != code.shards:
            raise StoreConfigError(f"{len(self.roots)} roots for ec {self.ec}: it needs {code.shards}")
        if not 0 <= self.ec_margin <= code.parity:
            raise StoreConfigError(f"ec_margin is {self.ec_margin}, it must be 0 to {code.parity} with ec {self.ec}")
        if self.backend == "memory":
            raise StoreConfigError("ec with backend 'memory': memory has no roots to lose, leave one of them out")
