"""What the environment asks of the chunk scheduler."""

from dataclasses import dataclass
from math import inf

from deepinfer_vllm import envs


@dataclass(frozen=True)
class Settings:
    """Its switches, resolved."""

    target_s: float
    """Seconds between two tokens of a running decode, of 99 in 100; inf: as many tokens a second as there can be."""
    least_share: float
    """Of the prefill that there can be, which prompts get beside decodes whatever the target."""
    grid: int
    """Chunks end at multiples of so many tokens."""
    most_tokens: int
    """Of one chunk."""
    most_context: int
    """Tokens up to which the chunks of a step reach, added up."""
    file: str
    """Where coefficients are read from at start and written to; empty for none."""

    @classmethod
    def read(cls) -> "Settings":
        """From the environment. Raises ValueError for a value that is not allowed, or a chunk below the grid."""
        grid, most = envs.DEEPINFER_VLLM_SCHED_GRID, envs.DEEPINFER_VLLM_SCHED_CHUNK
        if most < grid:
            raise ValueError(
                f"DEEPINFER_VLLM_SCHED_CHUNK={most} is less than DEEPINFER_VLLM_SCHED_GRID={grid}: no chunk could "
                "end at a multiple of it. Raise the first or lower the second"
            )
        return cls(
            target_s=envs.DEEPINFER_VLLM_SCHED_TARGET_MS / 1000 or inf,
            least_share=envs.DEEPINFER_VLLM_SCHED_PREFILL_SHARE,
            grid=grid,
            most_tokens=most,
            most_context=envs.DEEPINFER_VLLM_SCHED_CONTEXT or 1 << 40,
            file=envs.DEEPINFER_VLLM_SCHED_COSTS,
        )
