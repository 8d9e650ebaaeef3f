"""The mock engine's prefix cache: blocks by the hash of everything up to them, the oldest leaving first."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import xxhash


class PrefixCache:
    """Hashes of full blocks of one rank, at most `capacity_blocks`. Remembers that they were computed, not what."""

    def __init__(self, block_tokens: int, capacity_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def keys(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The chained hash of each full block."""
        data = memoryview(array("I", tokens).tobytes())
        step = 4 * self.block_tokens
        found, parent = [], xxhash.xxh3_64_intdigest(salt.encode())
        for start in range(0, len(data) - step + 1, step):
            parent = xxhash.xxh3_64_intdigest(data[start : start + step], seed=parent)
            found.append(parent)
        return found

    def hit_tokens(self, keys: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of the longest prefix held; the prompt's last token is always computed, as vLLM does."""
        blocks = 0
        while blocks < len(keys) and keys[blocks] in self._blocks:
            self._blocks.move_to_end(keys[blocks])
            blocks += 1
        return min(blocks, (prompt_tokens - 1) // self.block_tokens) * self.block_tokens

    def add(self, keys: Sequence[int]) -> None:
        """Hold these too; the least recently used make room."""
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
