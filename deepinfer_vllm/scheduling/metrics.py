"""The chunk scheduler's metrics, `vllm:deepinfer_sched_*`.

`python -m deepinfer_vllm.scheduling.metrics` prints the table of docs/scheduling.md.
"""

from typing import Any

from deepinfer_vllm.report_metrics import Definitions, ReportMetrics

COUNTERS = {
    "mixed_steps": "Steps that computed chunks of prompts beside decodes.",
    "over_target_steps": "Mixed steps that were thought to take longer than the target, as a prompt had to go on.",
    "least_share_steps": "Mixed steps whose chunks got their least share, the target having no room for it.",
    "chunks": "Chunks of prompts, the last ones of each with them.",
    "chunk_tokens": "Tokens of these.",
    "checkpoint_cuts": "Chunks that ended at one of their request's chunk_checkpoints.",
}
GAUGES = {
    "target_seconds": "The target between two tokens; 0 in throughput mode.",
    "tail": "What 99 of 100 mixed steps take at most, of what they were predicted to; the target is divided by it.",
    "cost_error": "Median error of predicted step times, relative to what was measured, of the last 64 steps.",
    "step_seconds": "cost: seconds of any step.",
    "prefill_seconds": "cost: alpha, seconds of a step with one prefill.",
    "token_seconds": "cost: beta, seconds of a new token.",
    "pair_seconds": "cost: gamma, seconds of a new token and one that it attends to.",
    "index_pair_seconds": "cost: index, seconds of a new token and one that its index scans.",
    "decode_seconds": "cost: seconds of a token of a decode.",
    "context_seconds": "cost: seconds of a cached token of a decode.",
    "embed_seconds": "cost: seconds of an embedding of an image.",
}
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "step_chunk_tokens": ("Tokens of chunks in a step that had any.", tuple(2**n for n in range(4, 17))),
    "predicted_step_seconds": ("Seconds that a step was thought to take.", SECONDS),
    "measured_step_seconds": ("Seconds that the same steps took.", SECONDS),
}
DEFINITIONS = Definitions("vllm:deepinfer_sched_", COUNTERS, GAUGES, HISTOGRAMS)


def metrics_for(vllm_config: Any, engines: list[int]) -> ReportMetrics | None:
    """For an engine with this scheduler; see `compat.engine_reports`."""
    chosen = vllm_config.scheduler_config.scheduler_cls
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__module__", "")
    if not name.startswith("deepinfer_vllm.scheduling."):
        return None
    return ReportMetrics(DEFINITIONS, vllm_config.model_config.served_model_name, engines)


if __name__ == "__main__":
    print(DEFINITIONS.markdown_table())
