"""What the conditions for DeepSeek-V4.1 on Ascend look at, taken out of vLLM's configuration once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deepinfer_vllm.models import ARCHITECTURE, PORTABLE_CLASSES
from deepinfer_vllm.platforms.detection import AscendStack, find_stack


class Implementation(StrEnum):
    """Whose V4.1 classes vLLM has registered."""

    PORTABLE = "portable"
    ASCEND = "vllm-ascend"
    OTHER = "other"


@dataclass(frozen=True)
class EngineFacts:
    """`classes`: the module of each class that serves, by architecture. `draft_tokens`: a step's, 0 without drafts.

    `fp4_experts`: whether expert weights are in MXFP4 in memory, not only in the checkpoint.
    """

    stack: AscendStack
    classes: Mapping[str, str] = field(default_factory=dict)
    wanted_model: str = "auto"
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    tensor_parallel: int = 1
    heads: int = 64
    eplb: bool = False
    fp4_experts: bool = False
    kv_connectors: tuple[str, ...] = ()
    runner_v2: bool = False
    draft_tokens: int = 0

    @property
    def implementation(self) -> Implementation:
        """The target model's."""
        return implementation(self.classes.get(ARCHITECTURE, ""))


def implementation(module: str) -> Implementation:
    """Whose the class is that is registered with this module's name."""
    owners = {"deepinfer_vllm": Implementation.PORTABLE, "vllm_ascend": Implementation.ASCEND}
    return owners.get(module.partition(".")[0], Implementation.OTHER)


def registered_module(architecture: str) -> str:
    """The module of the class that vLLM's registry has for `architecture`, or ""."""
    from vllm.model_executor.models import ModelRegistry

    entry: Any = ModelRegistry.models.get(architecture)
    # By name, or as a class.
    return str(getattr(entry, "module_name", None) or getattr(getattr(entry, "model_cls", None), "__module__", ""))


def is_v41(vllm_config: Any) -> bool:
    """Whether the engine's model is a DeepSeek-V4.1. Other models are none of our business."""
    model = vllm_config.model_config
    return model is not None and getattr(model.hf_config, "model_type", None) == "deepseek_v41"


def collect(vllm_config: Any) -> EngineFacts:
    """The facts of an engine that runs a V4.1. Raises ValueError for an environment variable of ours."""
    from deepinfer_vllm import envs

    hf, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
    speculation, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    fp4 = getattr(hf, "expert_dtype", None) == "fp4"
    architectures = PORTABLE_CLASSES if speculation else [ARCHITECTURE]
    classes = {architecture: registered_module(architecture) for architecture in architectures}
    portable = implementation(classes[ARCHITECTURE]) is Implementation.PORTABLE
    widened = portable and envs.DEEPINFER_VLLM_WEIGHTS != "packed"  # as they are loaded
    return EngineFacts(
        stack=find_stack(),
        classes=classes,
        wanted_model=envs.DEEPINFER_VLLM_MODEL,
        pipeline_parallel=parallel.pipeline_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
        tensor_parallel=parallel.tensor_parallel_size,
        heads=hf.num_attention_heads,
        eplb=parallel.enable_eplb,
        fp4_experts=fp4 and not widened,
        kv_connectors=_connectors(transfer) if transfer else (),
        runner_v2=vllm_config.use_v2_model_runner,
        draft_tokens=(speculation.num_speculative_tokens or 0) if speculation else 0,
    )


def _connectors(transfer: Any) -> tuple[str, ...]:
    """All that are named, each of MultiConnector's."""
    if transfer.kv_connector != "MultiConnector":
        return (transfer.kv_connector,)
    return tuple(str(child.get("kv_connector")) for child in transfer.kv_connector_extra_config.get("connectors", []))
