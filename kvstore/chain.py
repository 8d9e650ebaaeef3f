"""Block hashes of a prompt, byte for byte those that vLLM computes with `--prefix-caching-hash-algo sha256_cbor`.

The hash of a block is SHA-256 over the canonical CBOR of [hash of the block before, [token, ...], extra keys or null],
so one hash stands for the whole prefix that ends there. Only whole blocks have one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import overload

import cbor2

from deepinfer_kvstore import native
from deepinfer_kvstore.extra_keys import NOTHING_EXTRA, ExtraKeys, Keys
from deepinfer_kvstore.keys import HASH_BYTES

SOURCE = Path(__file__).with_name("chain.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC")
Append = Callable[[bytearray, "array[int]", int, int, int, Keys], None]
"""(packed, tokens, first token, blocks, tokens a block, extra keys of all these blocks): append their hashes."""

DEFAULT_SEED = "vllm-none-hash"

Tokens = Sequence[int] | bytes | bytearray | memoryview
"""Token ids of 0 to 2**32 - 1. Bytes, and memory of bytes, are little-endian u32."""

logger = logging.getLogger("vllm.deepinfer")  # vLLM shows its own loggers only


def none_hash(seed: str | None = None) -> bytes:
    """The chain's root: what comes before the first block. 32 bytes.

    vLLM makes it from PYTHONHASHSEED where that is set, else from a constant. `seed` is the engine's PYTHONHASHSEED;
    None takes this process's.
    """
    if seed is None:
        seed = os.environ.get("PYTHONHASHSEED", DEFAULT_SEED)
    return hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()


def as_tokens(tokens: Tokens) -> array[int]:
    """Token ids as an array of u32; no copy where they are one.

    Raises:
        ValueError: an id that is no whole number of 0 to 2**32 - 1, or bytes that are no whole number of ids.
    """
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        if not isinstance(tokens, bytes | bytearray | memoryview) or memoryview(tokens).itemsize != 1:
            return array("I", tokens)
        ids = array("I")
        ids.frombytes(tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"token ids are whole numbers of 0 to 4294967295, as bytes four each: {error}") from error


class ChainHasher:
    """Makes the chains of one namespace. Thread-safe.

    `hash_tokens` (tokens a hash) and `root` (see `none_hash`) are in its descriptor. Compiled code is used where it
    can be had, unless `compiled` is False.
    """

    def __init__(self, hash_tokens: int, root: bytes, *, compiled: bool = True) -> None:
        """Raises:
        ValueError: a root of another length; compiled code would write beyond its memory.
        """
        if len(root) != HASH_BYTES:
            raise ValueError(f"root has {len(root)} bytes, a chain needs {HASH_BYTES}: give what none_hash() makes")
        self.hash_tokens = hash_tokens
        self.root = root
        self._append = (compiled and _compiled()) or _append_python

    def hashes(self, tokens: Tokens, extra: ExtraKeys = NOTHING_EXTRA) -> list[bytes]:
        """The hash of each whole block of a prompt, 32 bytes each.

        Raises:
            ValueError: see `as_tokens`.
        """
        chain = Chain(self, extra)
        chain.extend(tokens)
        return chain.hashes()

    def append(self, packed: bytearray, tokens: array[int], blocks: int, extra: ExtraKeys) -> None:
        """Append the hashes of the first `blocks` blocks of `tokens` to `packed`, which is the root and all hashes
        before them."""
        at = 0
        for run, keys in extra.runs(len(packed) // HASH_BYTES - 1, blocks, self.hash_tokens):
            self._append(packed, tokens, at, run, self.hash_tokens, keys)
            at += run * self.hash_tokens


class Chain:
    """The chain of a sequence that grows. Not thread-safe.

    `packed` goes on from another chain of the same hasher: root and hashes. It belongs to this chain from then on.
    """

    def __init__(self, hasher: ChainHasher, extra: ExtraKeys = NOTHING_EXTRA, packed: bytearray | None = None) -> None:
        self.packed = bytearray(hasher.root) if packed is None else packed
        """The root, then every hash."""
        self._hasher = hasher
        self._extra = extra
        self._open = array("I")

    @property
    def tokens(self) -> int:
        """Tokens so far, with those of the block that is not full yet."""
        return (len(self.packed) // HASH_BYTES - 1) * self._hasher.hash_tokens + len(self._open)

    def extend(self, tokens: Tokens) -> None:
        """Append tokens.

        Raises:
            ValueError: see `as_tokens`. The chain is as before.
        """
        ids = as_tokens(tokens)
        if self._open:
            ids = self._open + ids
        blocks = len(ids) // self._hasher.hash_tokens
        self._hasher.append(self.packed, ids, blocks, self._extra)
        self._open = ids[blocks * self._hasher.hash_tokens :]

    def hashes(self) -> list[bytes]:
        """The hash of each whole block."""
        return list(HashRow(bytes(self.packed))[1:])


class HashRow(Sequence[bytes]):
    """Hashes that lie in a row, cut out when they are looked at."""

    def __init__(self, packed: bytes, places: range | None = None) -> None:
        self._packed = packed
        self._places = range(len(packed) // HASH_BYTES) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> HashRow: ...
    def __getitem__(self, place: int | slice) -> bytes | HashRow:
        if isinstance(place, slice):
            return HashRow(self._packed, self._places[place])
        at = HASH_BYTES * self._places[place]
        return self._packed[at : at + HASH_BYTES]


def _append_python(packed: bytearray, tokens: array[int], at: int, blocks: int, size: int, keys: Keys) -> None:
    parent = bytes(packed[-HASH_BYTES:])
    for start in range(at, at + blocks * size, size):
        block = cbor2.dumps((parent, tuple(tokens[start : start + size]), keys), canonical=True)
        parent = hashlib.sha256(block).digest()
        packed += parent


@functools.cache
def _compiled(portable: bool = False) -> Append | None:
    """The same in C, the same for the life of the process; None where it is switched off or cannot be built. `portable`
    leaves instructions alone that only some CPUs have."""
    if not native.allowed():
        return None
    try:
        cache = native.cache_directory("deepinfer_kvstore")
        library = ctypes.CDLL(str(native.build(SOURCE, FLAGS, (), cache, native.compiler())))
    except native.ERRORS as error:
        logger.info("No compiled hash chain, Python does its work: %s", error)
        return None
    function = library.deepinfer_chain
    function.argtypes = [c_void_p, c_size_t, c_size_t, c_char_p, c_size_t, c_void_p, c_int]
    function.restype = c_int

    def append(packed: bytearray, tokens: array[int], at: int, blocks: int, size: int, keys: Keys) -> None:
        extra = cbor2.dumps(keys, canonical=True)
        hashes = packed[-HASH_BYTES:] + bytes(blocks * HASH_BYTES)
        into = (c_char * len(hashes)).from_buffer(hashes)
        first, _ = tokens.buffer_info()
        if function(first + at * tokens.itemsize, blocks, size, extra, len(extra), addressof(into), portable):
            raise MemoryError("no memory for the message of one block")
        packed += memoryview(hashes)[HASH_BYTES:]

    return append
