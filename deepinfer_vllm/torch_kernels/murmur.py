"""The counter-based random numbers that runner V2 samples with: MurmurHash3 of (seed, position, token)."""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = 0xFFFFFFFF


def _rotate(value: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def _scramble(key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _rotate(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _absorb(state: NDArray[np.uint32], scrambled: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _rotate(state ^ scrambled, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _finish(state: NDArray[np.uint32]) -> NDArray[np.uint32]:
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(16))


@functools.lru_cache(maxsize=8)
def _scrambled_tokens(count: int) -> NDArray[np.uint32]:
    return _scramble(np.arange(count, dtype=np.uint32))


def words(seeds: Sequence[int], positions: Sequence[int], count: int, domain: int = 0) -> NDArray[np.uint32]:
    """[rows, count] uint32: the hash of each row's 64-bit seed, the low half of its position, and each token id."""
    keys = [(s & _MASK, (s >> 32) & _MASK, p & _MASK) for s, p in zip(seeds, positions, strict=True)]
    state: NDArray[np.uint32] = np.full(len(keys), domain, dtype=np.uint32)
    for scrambled in _scramble(np.array(keys, dtype=np.uint32).T):
        state = _absorb(state, scrambled)
    return _finish(_absorb(state[:, None], _scrambled_tokens(count)) ^ np.uint32(16))


def uniform32(seeds: Sequence[int], positions: Sequence[int], count: int) -> NDArray[np.float32]:
    """[rows, count] in (0, 1): (word + 1/2) / 2^32, in two halves that float32 holds exactly."""
    word = words(seeds, positions, count)
    high, low = (word >> np.uint32(16)).astype(np.float32), (word & np.uint32(0xFFFF)).astype(np.float32)
    return high * np.float32(2**-16) + (low + np.float32(0.5)) * np.float32(2**-32)


def uniform64(seeds: Sequence[int], positions: Sequence[int], count: int) -> NDArray[np.float64]:
    """[rows, count] in (0, 1): (53 bits + 1/2) / 2^53."""
    low = words(seeds, positions, count).astype(np.uint64)
    high = words(seeds, positions, count, domain=0x9E3779B9).astype(np.uint64)
    value = ((((high << np.uint64(32)) | low) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    value[value == 1.0] -= 2.0**-53
    return value
