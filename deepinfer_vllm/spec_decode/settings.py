"""What the environment asks of DSpark, and what this engine allows of it."""

from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_vllm import envs

Form = Literal["early-stop", "delayed", "fixed"]


@dataclass(frozen=True)
class Settings:
    """DSpark's switches, resolved."""

    form: Form
    """Which form of the verification budget; "fixed" verifies every draft."""
    calibration: str
    """"auto" (the file beside the checkpoint), "off", or a file."""
    record: str
    """The file that records confidences and outcomes; empty for none."""
    grammar: bool
    """Whether drafts keep to the request's grammar."""

    @classmethod
    def read(cls, *, current: bool) -> "Settings":
        """From the environment. `current`: the host has a step's confidences before it decides about that step.

        Raises ValueError for a value that is not allowed, or a form that needs what is not there.
        """
        asked = envs.DEEPINFER_VLLM_DSPARK_BUDGET
        if asked == "early-stop" and not current:
            raise ValueError(
                "DEEPINFER_VLLM_DSPARK_BUDGET=early-stop needs the confidences on the host before a step is launched, "
                "and this device's are still being computed then. Set it to auto or delayed"
            )
        return cls(
            form=("early-stop" if current else "delayed") if asked == "auto" else asked,
            calibration=envs.DEEPINFER_VLLM_DSPARK_CALIBRATION,
            record=envs.DEEPINFER_VLLM_DSPARK_RECORD,
            grammar=envs.DEEPINFER_VLLM_DSPARK_GRAMMAR,
        )


def trimming_problems(vllm_config: Any) -> list[str]:
    """What of this engine asks for every draft to be verified: the runner there needs the counts the scheduler gave."""
    parallel = vllm_config.parallel_config
    return [
        what
        for what, there in (
            (f"--data-parallel-size={parallel.data_parallel_size}", parallel.data_parallel_size > 1),
            (f"--pipeline-parallel-size={parallel.pipeline_parallel_size}", parallel.pipeline_parallel_size > 1),
            ("context parallelism", _context_ranks(parallel) > 1),
            ("--enable-batch-sharded-sampling", parallel.enable_batch_sharded_sampling),
            ("--enable-lora", vllm_config.lora_config is not None),
            ("--return-sampling-mask", vllm_config.model_config.return_sampling_mask),
            ("--enable-return-routed-experts", vllm_config.aux_output_config.enabled),
        )
        if there
    ]


def _context_ranks(parallel: Any) -> int:
    return int(parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size)
