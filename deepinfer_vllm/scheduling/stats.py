"""What the chunk scheduler did since it last said so."""

from math import isfinite

from deepinfer_costmodel.step import Load
from deepinfer_vllm.report_metrics import Report
from deepinfer_vllm.scheduling.costs import Costs


class SchedulerStats:
    """Counts as steps are scheduled and end; memory does not grow while they are taken. One thread."""

    def __init__(self, costs: Costs, target_s: float) -> None:
        self._costs, self._target_s = costs, target_s
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, int] = {}
        self._values: dict[str, list[float]] = {}

    def scheduled(self, load: Load, predicted_s: float, checkpoint_cuts: int, beyond_target: bool) -> None:
        """A step with chunks; see StepPlan.beyond_target."""
        mixed = load.decodes > 0
        over = mixed and predicted_s > self._target_s
        for name, number in (
            ("mixed_steps", int(mixed)),
            ("over_target_steps", int(over)),
            ("least_share_steps", int(mixed and beyond_target)),
            ("chunks", load.chunks),
            ("chunk_tokens", load.tokens),
            ("checkpoint_cuts", checkpoint_cuts),
        ):
            self._counts[name] = self._counts.get(name, 0) + number
        self._values.setdefault("step_chunk_tokens", []).append(load.tokens)

    def measured(self, predicted_s: float, seconds: float) -> None:
        """A step ended."""
        self._values.setdefault("predicted_step_seconds", []).append(predicted_s)
        self._values.setdefault("measured_step_seconds", []).append(seconds)

    def take(self) -> Report:
        """What has been counted since the last call, and the gauges as they are; empty if nothing was."""
        if not self._counts and not self._values:
            return {}
        report: Report = {"counters": self._counts, "gauges": self._gauges(), "histograms": self._values}
        self._clear()
        return report

    def _gauges(self) -> dict[str, float]:
        cost, error = self._costs.now, self._costs.error
        return {
            "target_seconds": self._target_s if isfinite(self._target_s) else 0.0,
            "tail": self._costs.tail,
            "step_seconds": cost.step,
            "prefill_seconds": cost.prefill.alpha,
            "token_seconds": cost.prefill.beta,
            "pair_seconds": cost.prefill.gamma,
            "index_pair_seconds": cost.prefill.index,
            "decode_seconds": cost.decode,
            "context_seconds": cost.context,
            "embed_seconds": cost.embed,
            **({} if error is None else {"cost_error": error}),
        }
