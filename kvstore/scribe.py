"""A journal without slabs: for a process that stores no blocks but has something to say of them."""

import logging
from collections.abc import Callable, Sequence
from time import monotonic

from deepinfer_kvstore.compaction import Compactor
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.network_fs import file_system_type, is_network
from deepinfer_kvstore.opening import Places
from deepinfer_kvstore.ownership import require_same_owner
from deepinfer_kvstore.record import Record
from deepinfer_kvstore.writer import Claims, Writer

_NO_SLABS = Geometry(0, 0)
"""Identities are taken over by others of their geometry, so scribes leave those that own slabs alone."""
RETRY_SECONDS = 30.0
_log = logging.getLogger(__name__)


class Scribe:
    """This process's identity in one namespace, claimed when first needed. Not thread-safe."""

    def __init__(
        self,
        places: Places,
        namespace: bytes,
        index: Index,
        *,
        lease_s: float = 30.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`places`: of the namespace of digest `namespace`; `index` keeps the journal short."""
        shared = any(is_network(file_system_type(root)) for root in places.roots)
        self._directory = places.namespace
        self._index = index
        self._compactor: Compactor | None = None
        self._claims = Claims(
            places.writers, places.journals, namespace, _NO_SLABS, lease_s=lease_s, shared=shared, clock=clock
        )
        self._lease_s = lease_s
        self._clock = clock
        self._writer: Writer | None = None
        self._beat_at = self._retry_at = clock()

    def append(self, records: Sequence[Record]) -> bool:
        """Append records; whether they are in the journal. Where it cannot be had or written, that is logged, and
        tried again after a while."""
        if not records or self._clock() < self._retry_at:
            return not records
        try:
            self.beat()
            if self._writer is None or not self._writer.held():
                self.close()
                require_same_owner(self._directory)
                self._writer = self._claims.claim()
                self._compactor = Compactor(self._writer.journal, self._index, self._writer.held)
            return self._writer.journal.append(records) == len(records)
        except (OSError, StoreConfigError) as error:
            _log.warning("%s: no journal, so nothing is held against collection: %s", self._directory, error)
            self._retry_at = self._clock() + RETRY_SECONDS
            return False

    def beat(self) -> None:
        """Show that this process lives. To be called several times a lease; costs nothing in between."""
        if self._writer and self._clock() >= self._beat_at:
            self._beat_at = self._clock() + self._lease_s / 4
            self._writer.beat()
        if self._compactor:
            self._compactor.keep_short()

    def close(self) -> None:
        """Let another process go on with the identity. Idempotent."""
        if self._writer:
            self._writer.release()
            self._writer = self._compactor = None
