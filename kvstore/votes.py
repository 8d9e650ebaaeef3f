"""Waiting for several roots that answer in their own time, some never."""

import errno
from threading import Condition
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


class Votes(Generic[T]):
    """What each of some roots said to one question, by number. Thread-safe."""

    def __init__(self, asked: int) -> None:
        self._asked = asked
        self._won: dict[int, T] = {}
        self._lost: dict[int, OSError] = {}
        self._changed = Condition()

    def won(self, index: int, value: T) -> None:
        """Root `index` did as it was asked."""
        with self._changed:
            self._won[index] = value
            self._changed.notify()

    def lost(self, index: int, error: OSError) -> None:
        """Root `index` could not."""
        with self._changed:
            self._lost[index] = error
            self._changed.notify()

    def wait(self, needed: int, seconds: float, grace_seconds: float) -> None:
        """Wait at most `seconds`: until `needed` did, then for the rest at most `grace_seconds` more; no longer than it
        takes to see that fewer than `needed` can."""
        deadline = monotonic() + seconds
        with self._changed:
            while len(self._won) < needed <= self._asked - len(self._lost) and monotonic() < deadline:
                self._changed.wait(deadline - monotonic())
            deadline = min(deadline, monotonic() + grace_seconds)
            while len(self._won) + len(self._lost) < self._asked and monotonic() < deadline:
                self._changed.wait(deadline - monotonic())

    def values(self) -> dict[int, T]:
        """By number of root, what those said that did."""
        with self._changed:
            return dict(self._won)

    def errors(self) -> dict[int, OSError]:
        """By number of root, why the others could not."""
        with self._changed:
            return dict(self._lost)

    def demand(self, needed: int, what: str, name: str) -> None:
        """
        Raises:
            OSError: fewer than `needed` roots did: as one of them says, or ETIMEDOUT.
        """
        with self._changed:
            if len(self._won) >= needed:
                return
            can = self._asked - len(self._lost)
            if can >= needed:
                raise OSError(
                    errno.ETIMEDOUT, f"{what}: {len(self._won)} of {self._asked} roots did in time, {needed} must", name
                )
            # A root that fails now says more than one that is lost, or has nothing.
            reason = max(self._lost.values(), key=lambda error: error.errno not in (errno.ENODEV, errno.ENOENT))
            number = errno.ENODEV if reason.errno == errno.ENOENT else reason.errno
            raise OSError(number, f"{what}: {can} of {self._asked} roots can ({reason}), {needed} must", name)
