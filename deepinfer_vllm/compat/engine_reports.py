"""What parts of an engine report of themselves, on its way to the process that answers /metrics.

vLLM carries its own counts in dataclasses of fixed fields. Ours ride in the scheduler's dict of connector statistics,
from which they are taken before anyone reads it. Of several API servers each adds what it is told.
"""

import functools
from importlib import import_module
from typing import Any

from deepinfer_vllm.compat.late import after_import

DRAFTS, EXPERTS, STEPS = "deepinfer_dspark", "deepinfer_eplb", "deepinfer_sched"
PUBLISHERS = {
    DRAFTS: "deepinfer_vllm.spec_decode.metrics",
    EXPERTS: "deepinfer_vllm.eplb.metrics",
    STEPS: "deepinfer_vllm.scheduling.metrics",
}
"""By key: the module whose `metrics_for(vllm_config, engines)` takes reports, or says None where there will be none."""


def attach(stats: Any, key: str, report: Any) -> None:
    """Put a report beside those of the connector, in `SchedulerStats`. One step has one report of a key."""
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), key: report}


def publish_reports() -> None:
    """Let attached reports reach Prometheus, in whichever of vLLM's processes this is."""
    after_import("vllm.v1.metrics.loggers", _publish)


def _publish(module: Any) -> None:
    manager = module.StatLoggerManager
    start, record = manager.__init__, manager.record
    if hasattr(record, "deepinfer_reports"):
        return

    @functools.wraps(start)
    def start_with_metrics(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        start(self, vllm_config, *args, **kwargs)
        found = {
            key: import_module(name).metrics_for(vllm_config, self.engine_indexes) for key, name in PUBLISHERS.items()
        }
        self.deepinfer_metrics = {key: metrics for key, metrics in found.items() if metrics is not None}

    @functools.wraps(record)
    def record_ours_too(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        if carried := getattr(scheduler_stats, "kv_connector_stats", None):
            for key in PUBLISHERS.keys() & carried.keys():
                report = carried.pop(key)
                if key in self.deepinfer_metrics:
                    self.deepinfer_metrics[key].observe(report, kwargs.get("engine_idx") or 0)
            scheduler_stats.kv_connector_stats = carried or None
        record(self, scheduler_stats, *args, **kwargs)

    record_ours_too.deepinfer_reports = True  # type: ignore[attr-defined]
    manager.__init__, manager.record = start_with_metrics, record_ours_too
