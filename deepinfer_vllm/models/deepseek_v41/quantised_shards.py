"""What a checkpoint's headers say about its quantised tensors, checked before anything is loaded."""

from pathlib import Path
from typing import Any

from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import BLOCK
from deepinfer_vllm.models.deepseek_v41.safetensors_map import stored_tensors

E4M3, E2M1 = ("F8_E4M3",), ("I8", "U8")
"""Header dtypes of weights that need a scale. Two e2m1 codes stand in a byte."""
_SCALE = ("F8_E8M0", "U8")
_SHOWN = 5


def check_quantised(directory: Path) -> None:
    """Raises CheckpointError where a quantised weight and its scale do not fit each other; reads headers only."""
    stored = stored_tensors(directory)
    problems = [
        problem
        for name, entry in sorted(stored.items())
        if name.endswith(".weight") and entry["dtype"] in E4M3 + E2M1
        if (problem := _misfit(name, entry, stored.get(f"{name.removesuffix('.weight')}.scale")))
    ]
    if problems:
        shown = "; ".join(problems[:_SHOWN]) + ("; …" if len(problems) > _SHOWN else "")
        raise CheckpointError(
            f"{len(problems)} quantised weights of {directory} cannot be read: {shown}. "
            "Fetch the checkpoint again, or convert it to bf16"
        )


def _misfit(name: str, weight: dict[str, Any], scale: dict[str, Any] | None) -> str | None:
    if scale is None:
        return f"{name} is {weight['dtype']} and has no scale beside it"
    if scale["dtype"] not in _SCALE:
        return f"the scale of {name} is {scale['dtype']}, not F8_E8M0"
    if len(weight["shape"]) != 2:
        return f"{name} has shape {weight['shape']}, not that of a matrix"
    rows, columns = weight["shape"][0], weight["shape"][1] * (1 if weight["dtype"] in E4M3 else 2)
    blocks = -(-columns // BLOCK)
    if scale["shape"] not in ([rows, blocks], [-(-rows // BLOCK), blocks]):
        return f"the scale of {name} has shape {scale['shape']}, which does not cover {[rows, columns]} by {BLOCK}"
    return None
