"""Counters, gauges and histograms that cost the event loop a fraction of a microsecond.

A module makes its families once, at import, and keeps the children that it counts on:

    REQUESTS = counter("requests", "Requests by API and status.", "api", "status")
    chat_ok = REQUESTS.labels("chat", "200")
    chat_ok.inc()

A family without labels has one child, `family.labels()`. For the event loop's thread; a snapshot may be taken on
another. A worker's families travel to the supervisor as a `Snapshot`, which `exposition` adds up and writes for
Prometheus.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

PREFIX = "deepinfer_router_"
MAX_CHILDREN = 2000
"""Label values of a family; what comes later is counted together as `OVERFLOW`."""
OVERFLOW = "other"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
"""Buckets of what a client waits for."""
FAST_SECONDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Buckets of what the router itself takes."""
TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)

Kind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "max", "min", "mean"]
"""What gauges of several workers are together."""
Snapshot = list[dict[str, Any]]
"""Of each family: name, kind, help, labels, buckets, merge and children, of plain types that msgpack carries."""

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class Counter:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`, at least 0."""
        self.value += amount

    def state(self) -> float:
        """What a snapshot has of it."""
        return self.value


class Gauge:
    """Goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        """Be `value` from now on."""
        self.value = value

    def inc(self, amount: float = 1) -> None:
        """Add `amount`."""
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        """Take `amount` off."""
        self.value -= amount

    def state(self) -> float:
        """What a snapshot has of it."""
        return self.value


class Histogram:
    """Counts by bucket, and the sum."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ends of the buckets, inclusive; one more without an end follows."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value` in its bucket."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def state(self) -> list[float]:
        """The sum, then the count of each bucket alone."""
        return [self.sum, *self.counts]


class _Child(Protocol):
    def state(self) -> float | list[float]: ...


ChildT = TypeVar("ChildT", bound=_Child)


class Family(Generic[ChildT]):
    """One metric: its children by label values."""

    def __init__(
        self,
        kind: Kind,
        name: str,
        help_text: str,
        labels: tuple[str, ...],
        make: Callable[[], ChildT],
        buckets: tuple[float, ...] = (),
        merge: Merge = "sum",
    ) -> None:
        self.kind = kind
        self.name = name
        """With `PREFIX`; of a counter without `_total`, which exposition adds."""
        self.help = help_text
        self.label_names = labels
        self.buckets = buckets
        self.merge = merge
        self._make = make
        self._children: dict[tuple[str, ...], ChildT] = {}

    def labels(self, *values: str) -> ChildT:
        """The child of these label values, made if new. Keep it where it is used often.

        Raises:
            ValueError: not one value a label.
        """
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"{self.name} has labels {self.label_names}, not {len(values)} of them: {values}")
            if len(self._children) >= MAX_CHILDREN:
                values = (OVERFLOW,) * len(values)
            child = self._children.setdefault(values, self._make())
        return child

    def remove(self, *values: str) -> None:
        """Show this child no more: what it was about is gone. What still counts on it counts for nobody."""
        self._children.pop(values, None)

    def snapshot(self) -> dict[str, Any]:
        """Itself and its children."""
        return {
            **self.describe(),
            "children": [[list(values), child.state()] for values, child in list(self._children.items())],
        }

    def describe(self) -> dict[str, Any]:
        """All but the children."""
        return {
            "name": self.name,
            "kind": self.kind,
            "help": self.help,
            "labels": list(self.label_names),
            "buckets": list(self.buckets),
            "merge": self.merge,
        }


class Registry:
    """All families of a process."""

    def __init__(self) -> None:
        self._families: dict[str, Family[Any]] = {}
        self._refresh: list[Callable[[], None]] = []

    def counter(self, name: str, help_text: str, *labels: str) -> Family[Counter]:
        """A family of counters. `name` without prefix and without `_total`.

        Raises:
            ValueError: a name that Prometheus would not read, or that there is already.
        """
        return self._add(Family("counter", PREFIX + name, help_text, labels, Counter))

    def gauge(self, name: str, help_text: str, *labels: str, merge: Merge = "sum") -> Family[Gauge]:
        """A family of gauges; over several workers they are `merge`d. Raises as `counter`."""
        return self._add(Family("gauge", PREFIX + name, help_text, labels, Gauge, merge=merge))

    def histogram(
        self, name: str, help_text: str, *labels: str, buckets: tuple[float, ...] = SECONDS
    ) -> Family[Histogram]:
        """A family of histograms with these upper ends. Raises as `counter`, and where they do not ascend."""
        if list(buckets) != sorted(set(buckets)) or not buckets:
            raise ValueError(f"buckets of {name} must ascend: {buckets}")
        return self._add(
            Family("histogram", PREFIX + name, help_text, labels, lambda: Histogram(buckets), buckets=buckets)
        )

    def before_snapshot(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` before each snapshot: to set gauges only when somebody looks."""
        self._refresh.append(refresh)

    def forget_refresh(self, refresh: Callable[[], None]) -> None:
        """Undo `before_snapshot`."""
        self._refresh.remove(refresh)

    def snapshot(self) -> Snapshot:
        """All families with their children, by name."""
        for refresh in self._refresh:
            refresh()
        return [family.snapshot() for _, family in sorted(self._families.items())]

    def describe(self) -> list[dict[str, Any]]:
        """All families without their children, by name."""
        return [family.describe() for _, family in sorted(self._families.items())]

    def _add(self, family: Family[ChildT]) -> Family[ChildT]:
        for name in (family.name, *family.label_names):
            if not _NAME.match(name) or name == "le":
                raise ValueError(f"{name!r} cannot name a metric or a label: lower case, digits and _ can")
        if family.name in self._families or family.name.endswith(("_total", "_bucket", "_sum", "_count")):
            raise ValueError(f"{family.name!r} is there already, or ends as Prometheus names parts of a metric")
        self._families[family.name] = family
        return family


REGISTRY = Registry()
"""This process's."""
counter = REGISTRY.counter
gauge = REGISTRY.gauge
histogram = REGISTRY.histogram
