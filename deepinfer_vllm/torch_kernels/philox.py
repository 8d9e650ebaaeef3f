"""Triton's `tl.rand`: Philox4x32-10 (Salmon et al. 2011) with the seed as key and the offset as counter."""

import numpy as np

_MASK = 0xFFFFFFFF
_ROUNDS = 10


def uniform(seed: int, offset: int) -> np.float32:
    """One value of [0, 1) for a 64-bit seed and offset. Raised to 2^-31 where it would be 0."""
    counter = [offset & _MASK, (offset >> 32) & _MASK, 0, 0]
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & _MASK, (a >> 32) ^ counter[3] ^ key[1], a & _MASK]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    word = counter[0] ^ _MASK if counter[0] >> 31 else counter[0]
    scale = np.float32(4.6566127342e-10)
    return max(np.float32(word) * scale, scale)
