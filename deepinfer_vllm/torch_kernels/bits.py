"""Sets of tokens, a bit a token."""

import numpy as np
from numpy.typing import NDArray


def unpack_bits(words: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[n] words to [32 n], lowest bit first."""
    return np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)


def pack_bits(members: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[32 n] to [n] words, lowest bit first."""
    return np.packbits(members, bitorder="little").view(np.int32)
