"""What drafting did, on its way from the worker that knows it to the scheduler; `engine_reports` takes it further.

A worker's output is a dataclass of fixed fields; ours ride on it as an attribute. Of several ranks the one whose output
counts speaks.
"""

import functools
from typing import Any

from deepinfer_vllm.compat.engine_reports import DRAFTS, attach
from deepinfer_vllm.compat.late import after_import


def carry_draft_stats() -> None:
    """Let reports of a speculator with `stats` reach the scheduler, in whichever of vLLM's processes this is."""
    after_import("vllm.v1.worker.gpu.model_runner", _send)
    after_import("vllm.v1.core.sched.scheduler", _pass_on)


def _send(module: Any) -> None:
    sample = module.GPUModelRunner.sample_tokens
    if hasattr(sample, DRAFTS):
        return

    @functools.wraps(sample)
    def sample_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        stats = getattr(self.speculator, "stats", None)
        result = getattr(output, "model_runner_output", None)
        if stats is not None and result is not None and (report := stats.take()):
            setattr(result, DRAFTS, report)
        return output

    setattr(sample_and_report, DRAFTS, True)
    module.GPUModelRunner.sample_tokens = sample_and_report


def _pass_on(module: Any) -> None:
    update = module.Scheduler.update_from_output
    if hasattr(update, DRAFTS):
        return

    @functools.wraps(update)
    def update_and_pass_on(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        if (report := getattr(model_runner_output, DRAFTS, None)) is not None:
            for output in outputs.values():
                if (stats := output.scheduler_stats) is not None:
                    attach(stats, DRAFTS, report)
        return outputs

    setattr(update_and_pass_on, DRAFTS, True)
    module.Scheduler.update_from_output = update_and_pass_on
