"""What an engine's parts count of themselves, as Prometheus's metrics with vLLM's labels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Report = dict[str, Mapping[str, Any]]
"""By kind (`counters`, `gauges`, `histograms`) and name: numbers, lists by position and of values. Plain ints, floats
and lists, so that it passes through vLLM's queues."""


@dataclass(frozen=True)
class Definitions:
    """Names, without the prefix, and what they say."""

    prefix: str
    """Begins with `vllm:`: so vLLM forgets the metrics of a former engine, and shows those of this one to
    `LLM.get_metrics`."""
    counters: Mapping[str, str]
    gauges: Mapping[str, str]
    histograms: Mapping[str, tuple[str, tuple[float, ...]]]
    """What each says, and its buckets."""
    position_counters: Mapping[str, str] = field(default_factory=dict)
    """Counters with one more label, `position`; their reports are lists."""

    def markdown_table(self) -> str:
        """Their table for a page."""
        rows: list[tuple[str, str, str]] = [
            *((name, "counter", text) for name, text in {**self.counters, **self.position_counters}.items()),
            *((name, "gauge", text) for name, text in self.gauges.items()),
            *((name, "histogram", text) for name, (text, _) in self.histograms.items()),
        ]
        lines = [f"| `{name}` | {kind} | {text} |" for name, kind, text in rows]
        return "\n".join([f"| `{self.prefix}` | Kind | Says |", "| --- | --- | --- |", *lines])


class ReportMetrics:
    """Prometheus's metrics of some engines. For the thread that records vLLM's own."""

    def __init__(self, definitions: Definitions, model_name: str, engines: list[int]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._by_position = definitions.position_counters
        prefix, labels = definitions.prefix, ["model_name", "engine"]
        counters = {name: Counter(prefix + name, text, labels) for name, text in definitions.counters.items()}
        by_position = {
            name: Counter(prefix + name, text, [*labels, "position"]) for name, text in self._by_position.items()
        }
        gauges = {
            name: Gauge(prefix + name, text, labels, multiprocess_mode="mostrecent")
            for name, text in definitions.gauges.items()
        }
        histograms = {
            name: Histogram(prefix + name, text, labels, buckets=buckets)
            for name, (text, buckets) in definitions.histograms.items()
        }
        self._metrics: dict[str, Any] = {**counters, **by_position, **gauges, **histograms}
        self._labels = {engine: (model_name, str(engine)) for engine in engines}
        for engine in engines:
            for metric in (*counters.values(), *histograms.values()):
                metric.labels(*self._labels[engine])  # there from the start, as 0

    def observe(self, report: Report, engine: int) -> None:
        """Add what one step of the engine reported."""
        labels = self._labels[engine]
        for name, number in report["counters"].items():
            if name in self._by_position:
                for position, count in enumerate(number):
                    self._metrics[name].labels(*labels, str(position)).inc(count)
            else:
                self._metrics[name].labels(*labels).inc(number)
        for name, value in report["gauges"].items():
            self._metrics[name].labels(*labels).set(value)
        for name, values in report["histograms"].items():
            for value in values:
                self._metrics[name].labels(*labels).observe(value)
