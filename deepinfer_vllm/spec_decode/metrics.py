"""DSpark's metrics, `vllm:deepinfer_dspark_*`, in the process that answers /metrics.

`python -m deepinfer_vllm.spec_decode.metrics` prints the table of docs/serving.md.
"""

from typing import Any

from deepinfer_vllm.spec_decode.stats import Report

PREFIX = "vllm:deepinfer_dspark_"
"""vLLM forgets the metrics of a former engine, and shows those of this one to `LLM.get_metrics`, by their `vllm:`."""

COUNTERS = {
    "draft_steps": "Steps that drafted a block for each of their requests.",
    "withheld_steps": "Steps that drafted none, because it would not have paid.",
    "drafted_tokens": "Tokens drafted.",
    "masked_tokens": "Tokens of these that were drawn under their request's grammar.",
    "unmasked_requests": "Requests whose structured outputs drafts do not follow: of another backend than xgrammar.",
    "verifications": "Requests, step by step, that had a token sampled: with the drafts accepted they make the tokens.",
}
POSITION_COUNTERS = {
    "verified_tokens": "Drafted tokens that the target computed, by their position in the block, from 0.",
    "accepted_tokens": "Drafted tokens that stood, by position.",
}
GAUGES = {
    "drafting": "1 if the last step drafted a block, 0 if it would not have paid.",
    "accepted_length": "Tokens a request gets in a step, the sampled one with them: mean of about the last 1024.",
    "calibrated": "1 if confidences are corrected by a calibration that was made for this checkpoint.",
    "calibration_error": "How far confidences are from what stands: expected calibration error of the last drafts.",
    "cost_error": "Median of |predicted - measured| / measured of the last steps.",
}
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "budget_tokens": ("Drafted tokens that a step verifies, all requests together.", (0, *(2**n for n in range(11)))),
    "predicted_step_seconds": ("Seconds that a step was thought to take.", SECONDS),
    "measured_step_seconds": ("Seconds that the same steps took.", SECONDS),
}


class DraftMetrics:
    """Prometheus's metrics of some engines, with vLLM's labels. For the thread that records vLLM's own."""

    def __init__(self, model_name: str, engines: list[int]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        labels = ["model_name", "engine"]
        counters = {name: Counter(PREFIX + name, text, labels) for name, text in COUNTERS.items()}
        by_position = {
            name: Counter(PREFIX + name, text, [*labels, "position"]) for name, text in POSITION_COUNTERS.items()
        }
        gauges = {
            name: Gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent") for name, text in GAUGES.items()
        }
        histograms = {
            name: Histogram(PREFIX + name, text, labels, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
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
            if name in POSITION_COUNTERS:
                for position, count in enumerate(number):
                    self._metrics[name].labels(*labels, str(position)).inc(count)
            else:
                self._metrics[name].labels(*labels).inc(number)
        for name, value in report["gauges"].items():
            self._metrics[name].labels(*labels).set(value)
        for name, values in report["histograms"].items():
            for value in values:
                self._metrics[name].labels(*labels).observe(value)


def markdown_table() -> str:
    """The table of docs/serving.md."""
    rows: list[tuple[str, str, Any]] = [
        *((name, "counter", text) for name, text in COUNTERS.items()),
        *((name, "counter", text) for name, text in POSITION_COUNTERS.items()),
        *((name, "gauge", text) for name, text in GAUGES.items()),
        *((name, "histogram", text) for name, (text, _) in HISTOGRAMS.items()),
    ]
    lines = [f"| `{name}` | {kind} | {text} |" for name, kind, text in rows]
    return "\n".join([f"| `{PREFIX}` | Kind | Says |", "| --- | --- | --- |", *lines])


if __name__ == "__main__":
    print(markdown_table())
