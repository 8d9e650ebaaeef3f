"""What a worker alone knows, of drafts and of experts, on its way to the scheduler; `engine_reports` takes it on.

A worker's output is a dataclass of fixed fields; ours ride on it as an attribute. Of several ranks the one whose output
counts speaks.
"""

import functools
from typing import Any

from deepinfer_vllm.compat.engine_reports import DRAFTS, EXPERTS, attach
from deepinfer_vllm.compat.late import after_import

REPORTS = "deepinfer_reports"
"""Attribute of an output: its reports by key."""


def carry_worker_reports() -> None:
    """Let reports of speculators and EPLB states reach the scheduler, in whichever of vLLM's processes this is."""
    after_import("vllm.v1.worker.gpu.model_runner", _send)
    after_import("vllm.v1.worker.gpu_model_runner", _send)
    after_import("vllm.v1.core.sched.scheduler", _pass_on)


def _send(module: Any) -> None:
    sample = module.GPUModelRunner.sample_tokens
    if hasattr(sample, REPORTS):
        return

    @functools.wraps(sample)
    def sample_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        if (result := _result_of(output)) is not None and (reports := _reports_of(self)):
            setattr(result, REPORTS, reports)
        return output

    setattr(sample_and_report, REPORTS, True)
    module.GPUModelRunner.sample_tokens = sample_and_report


def _result_of(output: Any) -> Any:
    """What of a runner's output goes to the scheduler; None for what one stage hands to the next."""
    for name in ("model_runner_output", "_model_runner_output"):  # of runner V2, and of V1 if asynchronous
        if (result := getattr(output, name, None)) is not None:
            return result
    return output if hasattr(output, "req_id_to_index") else None


def _reports_of(runner: Any) -> dict[str, Any]:
    owners = {
        DRAFTS: getattr(runner, "speculator", None),
        EXPERTS: getattr(getattr(runner, "eplb_state", None), "deepinfer_balancer", None),
    }
    found = {key: getattr(owner, "stats", None) for key, owner in owners.items()}
    return {key: report for key, stats in found.items() if stats is not None and (report := stats.take())}


def _pass_on(module: Any) -> None:
    update = module.Scheduler.update_from_output
    if hasattr(update, REPORTS):
        return

    @functools.wraps(update)
    def update_and_pass_on(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        for key, report in getattr(model_runner_output, REPORTS, {}).items():
            for output in outputs.values():
                if (stats := output.scheduler_stats) is not None:
                    attach(stats, key, report)
        return outputs

    setattr(update_and_pass_on, REPORTS, True)
    module.Scheduler.update_from_output = update_and_pass_on
