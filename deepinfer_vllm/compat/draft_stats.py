"""What drafting did, on its way from the worker that knows it to the process that answers /metrics.

vLLM carries its own counts along this way in dataclasses of fixed fields. Ours ride on what has room: an attribute of
the worker's output, then the scheduler's dict of connector statistics, from which they are taken before anyone reads
it. Of several ranks the one whose output counts speaks; of several API servers each adds what it is told.
"""

import functools
from typing import Any

from deepinfer_vllm.compat.late import after_import

KEY = "deepinfer_dspark"


def carry_draft_stats() -> None:
    """Let reports of a speculator with `stats` reach Prometheus, in whichever of vLLM's processes this is."""
    after_import("vllm.v1.worker.gpu.model_runner", _send)
    after_import("vllm.v1.core.sched.scheduler", _pass_on)
    after_import("vllm.v1.metrics.loggers", _publish)


def _send(module: Any) -> None:
    sample = module.GPUModelRunner.sample_tokens
    if hasattr(sample, KEY):
        return

    @functools.wraps(sample)
    def sample_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        stats = getattr(self.speculator, "stats", None)
        result = getattr(output, "model_runner_output", None)
        if stats is not None and result is not None and (report := stats.take()):
            setattr(result, KEY, report)
        return output

    setattr(sample_and_report, KEY, True)
    module.GPUModelRunner.sample_tokens = sample_and_report


def _pass_on(module: Any) -> None:
    update = module.Scheduler.update_from_output
    if hasattr(update, KEY):
        return

    @functools.wraps(update)
    def update_and_pass_on(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        if (report := getattr(model_runner_output, KEY, None)) is not None:
            for output in outputs.values():
                if (stats := output.scheduler_stats) is not None:
                    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: report}
        return outputs

    setattr(update_and_pass_on, KEY, True)
    module.Scheduler.update_from_output = update_and_pass_on


def _publish(module: Any) -> None:
    manager = module.StatLoggerManager
    start, record = manager.__init__, manager.record
    if hasattr(record, KEY):
        return

    @functools.wraps(start)
    def start_with_metrics(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        start(self, vllm_config, *args, **kwargs)
        speculative = vllm_config.speculative_config
        self.deepinfer_metrics = None
        if speculative is not None and speculative.method == "dspark":
            from deepinfer_vllm.spec_decode.metrics import DraftMetrics

            self.deepinfer_metrics = DraftMetrics(vllm_config.model_config.served_model_name, self.engine_indexes)

    @functools.wraps(record)
    def record_ours_too(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        carried = getattr(scheduler_stats, "kv_connector_stats", None)
        if carried and (report := carried.pop(KEY, None)) is not None:
            scheduler_stats.kv_connector_stats = carried or None
            if self.deepinfer_metrics is not None:
                self.deepinfer_metrics.observe(report, kwargs.get("engine_idx") or 0)
        record(self, scheduler_stats, *args, **kwargs)

    setattr(record_ours_too, KEY, True)
    manager.__init__, manager.record = start_with_metrics, record_ours_too
