"""Tokens of texts, remembered: the turns of a conversation come again with every turn that follows."""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

SMALL_CHARS = 256
"""A text of fewer is encoded anew: that costs no more than to look for it."""
ENTRY_BYTES = 400
"""What an entry takes besides its text and tokens."""

Key = tuple[str, str]


class TextTokens:
    """Least recently used texts, bounded by bytes. Thread-safe."""

    def __init__(self, encode: "Callable[[str], list[int] | array[int]]", most_bytes: int) -> None:
        self._encode = encode
        self._most_bytes = most_bytes
        self._bytes = 0
        self._known: OrderedDict[Key, array[int]] = OrderedDict()
        self._lock = Lock()

    def tokens(self, text: str, salt: str) -> "list[int] | array[int]":
        """What `encode` makes of `text`. Not to be changed. Texts of different `salt` are not found by each other."""
        if len(text) < SMALL_CHARS or not self._most_bytes:
            return self._encode(text)
        key = salt, text
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        made = array("I", self._encode(text))
        size = _size(key, made)
        with self._lock:
            if size <= self._most_bytes and key not in self._known:
                self._known[key] = made
                self._bytes += size
                while self._bytes > self._most_bytes:
                    oldest, tokens = self._known.popitem(last=False)
                    self._bytes -= _size(oldest, tokens)
        return made

    @property
    def held_bytes(self) -> int:
        """About what is held now."""
        return self._bytes


def _size(key: Key, tokens: "array[int]") -> int:
    salt, text = key
    return ENTRY_BYTES + len(salt) + len(text) * (1 if text.isascii() else 4) + tokens.itemsize * len(tokens)
