"""What a block's hash covers besides its tokens: adapter, images, salt, prompt embeddings, as vLLM's
`generate_block_hash_extra_keys` has them."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Keys = tuple[tuple[object, ...], ...] | None

_NO_EMBEDDINGS = hashlib.sha256().digest()


class Lora(NamedTuple):
    """An adapter, as the request names it."""

    name: str
    path: str


class MultiModal(NamedTuple):
    """An image, a video or a sound in the prompt."""

    identifier: str
    """vLLM's `MultiModalFeatureSpec.identifier`: a digest of the content, or what the user calls it."""
    offset: int
    """First of its placeholder tokens, counted from the start of the prompt."""
    length: int
    """Number of placeholder tokens."""


@dataclass(frozen=True)
class ExtraKeys:
    """Those of one request."""

    salt: str | None = None
    """The request's `cache_salt`; empty is none."""
    lora: Lora | None = None
    mm: Sequence[MultiModal] = ()
    """In order of offset."""
    embeds: Sequence[bytes] | None = None
    """With prompt embeddings: for each hash of the chain, the SHA-256 of the bytes of its rows of embeddings. Hashes
    beyond have no rows."""

    def runs(self, first_block: int, blocks: int, block_tokens: int) -> Iterator[tuple[int, Keys]]:
        """Blocks `first_block` and following, in runs of equal keys: each one's length and keys, in vLLM's order."""
        block, end = first_block, first_block + blocks
        item = bisect_right(self.mm, block * block_tokens, key=lambda item: item.offset + item.length) if block else 0
        last_end = self.mm[-1].offset + self.mm[-1].length if self.mm else 0
        while block < end:
            start, run = block * block_tokens, end - block
            keys: list[tuple[object, ...]] = [("lora", *self.lora)] if self.lora else []
            if start < last_end and item < len(self.mm):
                run = min(run, max(1, self.mm[item].offset // block_tokens - block))
                mm_keys, item = self._mm_keys(start, start + block_tokens, item)
                keys += mm_keys
            if block == 0 and self.salt:
                run = 1
                keys.append(("cache_salt", self.salt))
            if self.embeds is not None:
                run = 1
                keys.append(("prompt_embeds", self.embeds[block] if block < len(self.embeds) else _NO_EMBEDDINGS))
            yield run, tuple(keys) or None
            block += run

    def _mm_keys(self, start: int, end: int, item: int) -> tuple[list[tuple[object, ...]], int]:
        """Keys of the items in tokens `start` to `end` from number `item` on, and the item to go on with.

        As in vLLM, an item is looked at once the one before it has ended: of items that overlap, not every block has
        every one.
        """
        keys: list[tuple[object, ...]] = []
        while item < len(self.mm) and self.mm[item].offset < end:
            identifier, offset, length = self.mm[item]
            if start < offset + length:
                keys.append(("mm", identifier, offset - start))
                if end < offset + length:
                    break
            item += 1
        return keys, item


NOTHING_EXTRA = ExtraKeys()
