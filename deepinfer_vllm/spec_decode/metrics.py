"""DSpark's metrics, `vllm:deepinfer_dspark_*`, in the process that answers /metrics.

`python -m deepinfer_vllm.spec_decode.metrics` prints the table of docs/serving.md.
"""

from typing import Any

from deepinfer_vllm.report_metrics import Definitions, ReportMetrics

PREFIX = "vllm:deepinfer_dspark_"

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
    "cost_error": "Median error of predicted step times, relative to what was measured, of the last steps.",
}
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "budget_tokens": ("Drafted tokens that a step verifies, all requests together.", (0, *(2**n for n in range(11)))),
    "predicted_step_seconds": ("Seconds that a step was thought to take.", SECONDS),
    "measured_step_seconds": ("Seconds that the same steps took.", SECONDS),
}
DEFINITIONS = Definitions(PREFIX, COUNTERS, GAUGES, HISTOGRAMS, POSITION_COUNTERS)


def metrics_for(vllm_config: Any, engines: list[int]) -> ReportMetrics | None:
    """For an engine that drafts with DSpark; see `compat.engine_reports`."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "dspark":
        return None
    return ReportMetrics(DEFINITIONS, vllm_config.model_config.served_model_name, engines)


if __name__ == "__main__":
    print(DEFINITIONS.markdown_table())
