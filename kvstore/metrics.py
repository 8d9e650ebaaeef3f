"""What the daemon counts, for Prometheus: names `deepinfer_kvstore_*`."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "deepinfer_kvstore_"
MAX_TENANTS = 64
_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)


class NamespaceState(NamedTuple):
    """One namespace at the moment of a scrape."""

    namespace: str
    keys: int
    used_bytes: int
    """Slots in use, whole."""
    capacity_bytes: int
    """What it may take on the root, by the engine that opened it last; 0 where that is not known."""
    lag_seconds: float
    """Since the journals were last read to their end."""


class Metrics:
    """The counters of one daemon. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, registry=self.registry)

        self.check_seconds = Histogram(
            PREFIX + "check_seconds", "Time of one CHECK in the server.", buckets=_BUCKETS, registry=self.registry
        )
        self.checks = counter("checks", "CHECKs by how they ended: hit, miss, resend, or an error's code.", "result")
        self._asked_tokens = counter("asked_tokens", "Tokens of the prompts that were asked about.", "tenant")
        self._hit_tokens = counter("hit_tokens", "Tokens of them that were found.", "tenant")
        self._tenants: set[str] = set()
        self.connections = gauge("connections", "Open connections.")
        self.refused = counter("refused", "Connections closed or requests turned away, by reason.", "reason")
        self.tickets = gauge("tickets", "Tickets that hold blocks.")
        self.conversations = gauge("conversation_bytes", "Hashes kept for conversations, in bytes.")
        self.snapshots = gauge("snapshots", "Snapshots in the directory of role swa.")
        self.applied = counter("journal_records", "Journal records applied to the index, by kind.", "op")
        self.evicted = counter("evicted_blocks", "Blocks collected, by reason.", "reason")

    def count_tokens(self, tenant: str, asked: int, hit: int) -> None:
        """Count a CHECK's tokens. Tenants beyond the first `MAX_TENANTS` are counted as `other`."""
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        label = tenant if tenant in self._tenants else "other"
        self._asked_tokens.labels(label).inc(asked)
        self._hit_tokens.labels(label).inc(hit)

    def watch(self, states: Callable[[], Iterable[NamespaceState]]) -> None:
        """Ask `states` at each scrape."""
        self.registry.register(_States(states))


class _States(Collector):
    def __init__(self, states: Callable[[], Iterable[NamespaceState]]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        families = [
            GaugeMetricFamily(PREFIX + name, text, labels=["namespace"])
            for name, text in (
                ("keys", "Blocks in the index."),
                ("used_bytes", "Slots in use, whole."),
                ("capacity_bytes", "What the namespace may take on the root."),
                ("journal_lag_seconds", "Since the journals were last read to their end."),
            )
        ]
        for namespace, *values in self._states():
            for family, value in zip(families, values, strict=True):
                family.add_metric([namespace], float(value))
        return families

    def describe(self) -> Iterable[Metric]:
        return []
