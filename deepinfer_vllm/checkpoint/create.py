"""Create a checkpoint directory from a preset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer_vllm.checkpoint.presets import preset
from deepinfer_vllm.checkpoint.vision import VisionConfig
from deepinfer_vllm.checkpoint.writer import DTYPES, INDEX, Progress, write_checkpoint
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError


@dataclass(frozen=True)
class Created:
    directory: Path
    parameters: int
    size_bytes: int

    @classmethod
    def of(cls, directory: Path, parameters: int) -> Created:
        """Counts the bytes of a directory's files."""
        return cls(directory, parameters, sum(file.stat().st_size for file in directory.iterdir() if file.is_file()))


def create(
    directory: Path,
    *,
    name: str = "tiny",
    layers: int | None = None,
    seed: int = 0,
    shards: int = 2,
    dtype: str = "bf16",
    vision: bool = False,
    quant: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Created:
    """Write a checkpoint of random weights, with a small tower for images when `vision` is set, quantised as published
    when `quant` is.

    Raises CheckpointError for an unknown preset or dtype, too few layers or shards, and a directory that holds
    something already and may not be replaced.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    if seed < 0:
        raise CheckpointError(f"seed {seed} is negative: give 0 or more")
    if shards < 1:
        raise CheckpointError(f"{shards} shards are too few: at least one is needed")
    config = preset(name, layers).published(DTYPES[dtype], VisionConfig() if vision else None)
    if quant:
        from deepinfer_vllm.checkpoint.quantise import CONFIG

        config["quantization_config"] = CONFIG
    make_room(directory, force)
    parameters = write_checkpoint(directory, config, seed=seed, shards=shards, progress=progress)
    return Created.of(directory, parameters)


def make_room(directory: Path, force: bool) -> None:
    """Take away weights of an earlier run, which another shard count would leave behind; other files stay.

    Raises CheckpointError for a file, and for a directory that holds something unless `force`.
    """
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file: give a directory")
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if not force:
        raise CheckpointError(f"{directory} is not empty: give another directory, or --force to replace its weights")
    for old in (*directory.glob("model*.safetensors"), directory / INDEX):
        old.unlink(missing_ok=True)
