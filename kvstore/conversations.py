"""Chains of conversations, so that a turn sends and hashes its new tokens only."""

from collections import OrderedDict
from threading import Lock

from deepinfer_kvstore.keys import HASH_BYTES

MAX_CHAINS = 1 << 14
"""A short chain costs more than its hashes: some 400 bytes."""


class Conversations:
    """Chains by namespace and last hash, the most recently used `max_bytes` or `MAX_CHAINS` of them. Thread-safe.

    The last hash stands for everything before it, salt and adapter included: who names it cannot get another's chain
    by mistake, and what is kept here can never be out of date.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._chains: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, namespace: str, tail: bytes) -> bytes | None:
        """The hashes up to `tail`, in a row; None where they are not kept."""
        with self._lock:
            found = self._chains.get((namespace, tail))
            if found is not None:
                self._chains.move_to_end((namespace, tail))
            return found

    def keep(self, namespace: str, packed: bytes, before: bytes = b"") -> bytes:
        """Keep hashes, in the place of the chain that ended with `before`; their last, or b"" where there are none."""
        tail = packed[-HASH_BYTES:]
        with self._lock:
            for name in {before, tail}:
                self.bytes -= len(self._chains.pop((namespace, name), b""))
            if tail and len(packed) <= self._max_bytes:
                self._chains[namespace, tail] = packed
                self.bytes += len(packed)
            while self.bytes > self._max_bytes or len(self._chains) > MAX_CHAINS:
                _, oldest = self._chains.popitem(last=False)
                self.bytes -= len(oldest)
        return tail
