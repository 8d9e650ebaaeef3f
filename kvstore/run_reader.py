"""Reads and checks a run of slots in C, while other threads have the interpreter. In Python: `load_run.py`."""

import ctypes
import functools
import logging
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_uint64, c_void_p
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_128_digest

from deepinfer_kvstore import native
from deepinfer_kvstore.geometry import HEADER_BYTES
from deepinfer_kvstore.keys import KEY_BYTES
from deepinfer_kvstore.slot_run import SlotRun

SOURCE = Path(__file__).with_name("run_reader.c")
CACHED_CALL_BYTES = 512 << 10
"""Of one call where the page cache has the bytes: the checksum then finds them in the CPU's cache."""
MAX_GROUP_SLOTS = 8
FLAGS = ("-O2", "-fPIC", "-std=c11", "-Wall", "-Wextra", "-Werror")

logger = logging.getLogger(__name__)


class _Shape(Structure):
    _fields_ = [
        ("slot_bytes", c_uint64),
        ("header_bytes", c_uint64),
        ("call_slots", c_uint64),
        ("prefix_bytes", c_uint64),
        ("key_bytes", c_uint64),
        ("prefix", c_char_p),
        ("hash", c_void_p),
    ]


class _Stripes(Structure):
    _fields_ = [
        ("data", c_uint64),
        ("shard_bytes", c_uint64),
        ("stored_bytes", c_uint64),
        ("set", c_uint64),
        ("group_slots", c_uint64),
    ]


class _Hash(Structure):
    _fields_ = [("low", c_uint64), ("high", c_uint64)]


class ShardFiles(NamedTuple):
    """Where the data shards of neighbouring slots lie, in page caches at best."""

    fds: Sequence[int]
    shard_bytes: int
    stored_bytes: int
    set: int
    """The stripe set's number, u64."""


class RunReader:
    """For one store. Thread-safe."""

    @classmethod
    def make(cls, prefix: bytes, slot_bytes: int, call_slots: int) -> "RunReader | None":
        """`prefix` begins every header. None where compiled code is switched off or cannot be had."""
        compiled = _compiled()
        return cls(*compiled, prefix, slot_bytes, call_slots) if compiled else None

    def __init__(self, library: Any, hash_address: int, prefix: bytes, slot_bytes: int, call_slots: int) -> None:
        """Use `make`."""
        self._library = library
        self._group_slots = max(1, min(CACHED_CALL_BYTES // slot_bytes, call_slots, MAX_GROUP_SLOTS))
        self._prefix = prefix
        self._shape = _Shape(slot_bytes, HEADER_BYTES, call_slots, len(prefix), KEY_BYTES, prefix, hash_address)

    def read(self, fd: int, run: SlotRun, bounce: memoryview) -> bytes | None:
        """Fill the buffers of `run`: a byte a block, 1 where it is whole.

        `bounce` has as many bytes as the slots of a call. None where the kernel did not bring everything: who reads
        again learns why.
        """
        blocks = _Blocks(run, bounce)
        failed = self._library.deepinfer_read_run(self._shape, fd, run.first, *blocks.arguments)
        return None if failed else blocks.good.raw

    def read_shards(self, files: ShardFiles, run: SlotRun, bounce: memoryview) -> bytes | None:
        """`read` of slots in shards, without waiting. None also where a page cache lacks some, or writes differ."""
        blocks = _Blocks(run, bounce)
        stripes = _Stripes(len(files.fds), files.shard_bytes, files.stored_bytes, files.set, self._group_slots)
        fds, junk = array("i", files.fds), ctypes.create_string_buffer(files.stored_bytes)
        failed = self._library.deepinfer_read_shards(
            self._shape, stripes, fds.buffer_info()[0], junk, run.first, *blocks.arguments
        )
        return None if failed else blocks.good.raw

    def check(self, run: SlotRun, bounce: memoryview) -> bytes:
        """The same of slots that were read: whole pages of payloads into `buffers`, what is left, slot after slot, into
        `bounce`."""
        blocks = _Blocks(run, bounce)
        self._library.deepinfer_check_run(self._shape, *blocks.arguments)
        return blocks.good.raw


class _Blocks:
    """Blocks as C takes them; what it reads and writes lives as long as this."""

    def __init__(self, run: SlotRun, bounce: memoryview) -> None:
        self._held = [ctypes.c_char.from_buffer(buffer) for buffer in (*run.buffers, bounce)]
        self._addresses = array("Q", map(ctypes.addressof, self._held))
        self._lengths = array("I", map(len, run.buffers))
        self._generations = array("Q", run.generations)
        self.good = ctypes.create_string_buffer(len(run.keys))
        self.arguments = (
            len(run.keys),
            self._addresses.buffer_info()[0],
            self._lengths.buffer_info()[0],
            b"".join(run.keys),
            self._generations.buffer_info()[0],
            self._addresses[-1],
            self.good,
        )


@functools.cache
def _compiled() -> tuple[Any, int] | None:
    """The functions and the address of the checksum's, the same for the life of the process."""
    if not native.allowed():
        return None
    try:
        cache = native.cache_directory("deepinfer_kvstore")
        library = ctypes.CDLL(str(native.build(SOURCE, FLAGS, (), cache, native.compiler())))
        checksum = _checksum()
    except (*native.ERRORS, AttributeError, ImportError) as error:
        logger.info("No compiled reading of blocks, Python does its work: %s", error)
        return None
    blocks: list[Any] = [c_uint64, c_void_p, c_void_p, c_char_p, c_void_p, c_void_p, c_char_p]
    library.deepinfer_check_run.argtypes, library.deepinfer_check_run.restype = [POINTER(_Shape), *blocks], None
    library.deepinfer_read_shards.argtypes, library.deepinfer_read_shards.restype = (
        [POINTER(_Shape), POINTER(_Stripes), c_void_p, c_char_p, c_uint64, *blocks],
        c_int,
    )
    library.deepinfer_read_run.argtypes, library.deepinfer_read_run.restype = (
        [POINTER(_Shape), c_int, c_uint64, *blocks],
        c_int,
    )
    return library, checksum


def _checksum() -> int:
    """Where the xxhash package has XXH3-128: its C is the same, without its Python, which keeps the interpreter's lock.

    Raises:
        OSError, AttributeError, ImportError: this build of it does not say, or is another.
    """
    library = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
    # On x86 the one that looks what the CPU can do.
    function = getattr(library, "XXH3_128bits_dispatch", None) or library.XXH3_128bits
    function.argtypes, function.restype = [c_char_p, ctypes.c_size_t], _Hash
    for sample in (b"", b"deepinfer", bytes(range(256)) * 20):
        found = function(sample, len(sample))
        if found.high.to_bytes(8, "big") + found.low.to_bytes(8, "big") != xxh3_128_digest(sample):
            raise OSError("xxhash's library and its package disagree")
    return ctypes.cast(function, c_void_p).value or 0
