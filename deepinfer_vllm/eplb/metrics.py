"""EPLB's metrics, `vllm:deepinfer_eplb_*`, in the process that answers /metrics.

`python -m deepinfer_vllm.eplb.metrics` prints the table of docs/eplb.md.
"""

from typing import Any

from deepinfer_vllm.report_metrics import Definitions, ReportMetrics

COUNTERS = {
    "rebalances": "Rebalancings that ended.",
    "moved_experts": "Experts, counted layer by layer, that a rank got from another.",
    "moved_bytes": "Bytes of their weights.",
    "rebalance_seconds": "Seconds from their start to their end; if EPLB is asynchronous, steps go on meanwhile.",
    "failed_decisions": "Rebalancings that left all as it was, because no placement could be had; the log says why.",
    "slowest_rank_tokens": "Expert tokens of the slowest rank, summed over steps and layers.",
    "mean_rank_tokens": "The same of the mean rank: slowest over mean is moe_lb over any span of time.",
}
GAUGES = {
    "moe_lb": "Slowest over mean rank, each summed over layers and the last full window of 128 steps; 1 is balance.",
    "steps_since_rebalance": "Steps since a rebalancing ended or, before the first, since the start.",
    "stalled": "1 while a rebalancing has not ended for a whole interval, or the thread that does it is dead.",
}
DEFINITIONS = Definitions("vllm:deepinfer_eplb_", COUNTERS, GAUGES, histograms={})


def metrics_for(vllm_config: Any, engines: list[int]) -> ReportMetrics | None:
    """Those of engines that balance their experts."""
    if not vllm_config.parallel_config.enable_eplb:
        return None
    return ReportMetrics(DEFINITIONS, vllm_config.model_config.served_model_name, engines)


if __name__ == "__main__":
    print(DEFINITIONS.markdown_table())
