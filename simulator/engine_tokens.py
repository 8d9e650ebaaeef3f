"""The mock engine's vocabulary and its greedy decoding: both exact and cheap, so that answers can be checked by token.

A token of text is one byte. The next token is a function of all tokens before it, so an answer that goes on elsewhere,
from the prompt and the tokens so far, is the same answer; a token lost or repeated changes all that follow.
"""

from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

BOS, SYSTEM, USER, ASSISTANT, TOOL, EOS, IMAGE = range(256, 263)
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}

_LETTERS = b"etaoinshrdlucmfwypvbgkjqxz     ,"


def encode(text: str) -> list[int]:
    """One token a byte of UTF-8."""
    return list(text.encode())


def decode(ids: Iterable[int]) -> str:
    """The bytes among `ids`, as text; other tokens have none."""
    return bytes(token for token in ids if token < 256).decode(errors="replace")


class Continuation:
    """What the model says after some tokens. `choice` tells the answers of one request with n > 1 apart."""

    __slots__ = ("_end_every", "_state")

    def __init__(self, prompt: Sequence[int], end_every: int = 0, choice: int = 0) -> None:
        """`end_every`: an end of sequence comes after so many tokens on average; 0: never."""
        self._state = crc32(array("I", prompt).tobytes(), choice)
        self._end_every = end_every

    def next(self) -> int:
        """The next token, EOS included; it counts as said."""
        mixed = self._state * 0x9E3779B97F4A7C15 >> 24 & 0xFFFFFFFF
        ends = self._end_every and mixed // 32 % self._end_every == 0
        token = EOS if ends else _LETTERS[mixed % 32]
        self._state = crc32(token.to_bytes(4, "little"), self._state)
        return token


class Said(Continuation):
    """An answer that is prescribed."""

    __slots__ = ("_rest",)

    def __init__(self, ids: Sequence[int]) -> None:
        self._rest = iter(ids)

    def next(self) -> int:
        return next(self._rest, EOS)


def continuation(prompt: Sequence[int], tokens: int) -> list[int]:
    """The next `tokens` tokens after `prompt`, without ends."""
    model = Continuation(prompt)
    return [model.next() for _ in range(tokens)]
