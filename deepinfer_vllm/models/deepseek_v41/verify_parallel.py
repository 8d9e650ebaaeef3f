"""What of an engine's parallelism the portable model cannot do, flag by flag."""

from typing import Any

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.topology import layer_role


def problems(config: ModelConfig, parallel: Any) -> list[str]:
    """One phrase for each setting that cannot work: flag=value (must ...). `parallel` is vLLM's ParallelConfig."""
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    by_expert, experts, inner = parallel.enable_expert_parallel, config.num_experts, config.moe_intermediate_size
    found = [
        f"{flag}={value} (must be {allowed})"
        for flag, value, allowed, bad in (
            ("--tensor-parallel-size", tp, f"a divisor of o_groups={config.o_groups}", config.o_groups % tp),
            (
                "--tensor-parallel-size",
                tp,
                f"a divisor of the shared expert's width {inner * config.num_shared_experts}",
                inner * config.num_shared_experts % tp,
            ),
            (
                "--enable-expert-parallel",
                f"True over {tp * dp} processes",
                f"over at most n_routed_experts={experts}",
                by_expert and tp * dp > experts,
            ),
            (
                "--pipeline-parallel-size",
                parallel.pipeline_parallel_size,
                f"1: each KV group's layers ({_kv_groups(config)}) read one layer's rows, which no stage hands on",
                parallel.pipeline_parallel_size > 1,
            ),
            (
                "--decode-context-parallel-size",
                parallel.decode_context_parallel_size,
                "1",
                parallel.decode_context_parallel_size > 1,
            ),
            (
                "--prefill-context-parallel-size",
                parallel.prefill_context_parallel_size,
                "1",
                parallel.prefill_context_parallel_size > 1,
            ),
            (
                "--eplb-config.num_redundant_experts",
                parallel.eplb_config.num_redundant_experts,
                f"such that n_routed_experts={experts} and they are a multiple of {tp * dp} processes",
                parallel.enable_eplb and (experts + parallel.eplb_config.num_redundant_experts) % (tp * dp),
            ),
            ("--enable-dbo", True, "off", parallel.enable_dbo),
            ("--ubatch-size", parallel.ubatch_size, "at most 1", parallel.ubatch_size > 1),
        )
        if bad
    ]
    if not by_expert and inner % (tp * dp):
        found.append(
            f"--tensor-parallel-size={tp} times --data-parallel-size={dp} (must divide moe_intermediate_size={inner}, "
            "or --enable-expert-parallel be on)"
        )
    return found


def _kv_groups(config: ModelConfig) -> str:
    """The layers of each KV group: "2-7, 8-13"."""
    sources = [layer_role(config, i).kv_source for i in range(config.num_layers)]
    members = {source: [i for i, s in enumerate(sources) if s == source] for source in config.kv_sources}
    return ", ".join("-".join(map(str, sorted({layers[0], layers[-1]}))) for layers in members.values())
