"""The mock engine's /metrics, under vLLM's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_rank import Rank
from deepinfer_simulator.engine_transfer import Transfer


def exposition(config: EngineConfig, ranks: Sequence[Rank], counts: Counter[str], transfer: Transfer) -> bytes:
    """Prometheus' text form. A rank is the label `engine`, as in vLLM."""
    model = config.models[0]
    lines: list[str] = []

    def add(name: str, kind: str, values: Sequence[float], more: str = "") -> None:
        suffix = "_total" if kind == "counter" else ""
        lines.append(f"# TYPE vllm:{name}{suffix} {kind}")
        for rank, value in enumerate(values):
            lines.append(f'vllm:{name}{suffix}{{engine="{rank}",model_name="{model}"{more}}} {value}')

    add("num_requests_running", "gauge", [len(rank.running) for rank in ranks])
    add("num_requests_waiting", "gauge", [len(rank.waiting) for rank in ranks])
    add("kv_cache_usage_perc", "gauge", [rank.usage for rank in ranks])
    add("num_preemptions", "counter", [rank.preemptions for rank in ranks])
    add("prefix_cache_queries", "counter", [rank.cache_queries for rank in ranks])
    add("prefix_cache_hits", "counter", [rank.cache_hits for rank in ranks])
    add("prompt_tokens", "counter", [rank.prompt_tokens for rank in ranks])
    add("generation_tokens", "counter", [rank.output_tokens for rank in ranks])
    add("nixl_num_kv_expired_reqs", "counter", [transfer.expired] + [0] * (len(ranks) - 1))
    blocks = config.capacity_tokens // config.block_tokens
    cache = f',block_size="{config.block_tokens}",num_gpu_blocks="{blocks}",enable_prefix_caching="True"'
    add("cache_config_info", "gauge", [1] * len(ranks), cache)
    lines.append("# TYPE vllm:request_success_total counter")
    for reason in ("stop", "length", "abort"):
        value = counts[reason]
        lines.append(
            f'vllm:request_success_total{{engine="0",model_name="{model}",finished_reason="{reason}"}} {value}'
        )
    return ("\n".join(lines) + "\n").encode()
