"""Triton's `tl.rand`: Philox4x32-10 (Salmon et al. 2011) with the seed as key and the offset as counter."""

import numpy as np
from numpy.typing import NDArray

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def uniform(seeds: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    """A value of [0, 1) for each 64-bit seed and offset, of shapes that broadcast; 2^-31 where it would be 0."""
    seeds, offsets = np.broadcast_arrays(seeds.astype(np.uint64), offsets.astype(np.uint64))
    zero = np.zeros_like(seeds)
    counter = (offsets & _MASK, offsets >> _HALF, zero, zero)
    key0, key1 = seeds & _MASK, seeds >> _HALF
    for _ in range(_ROUNDS):
        a, b = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = ((b >> _HALF) ^ counter[1] ^ key0, b & _MASK, (a >> _HALF) ^ counter[3] ^ key1, a & _MASK)
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & _MASK, (key1 + np.uint64(0xBB67AE85)) & _MASK
    word = np.where(counter[0] >> np.uint64(31), counter[0] ^ _MASK, counter[0])
    scale = np.float32(4.6566127342e-10)
    return np.maximum(word.astype(np.float32) * scale, scale)
