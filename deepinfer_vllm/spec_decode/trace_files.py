"""A trace on disk: what a draft model is trained on, a file a text. docs/dspark-trace.md is its description.

Tensors are named as DeepSpec names them in its target cache, which holds the same things for other models.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SCHEMA = "deepinfer.dspark-trace/1"
MANIFEST = "manifest.json"
SUFFIX = ".safetensors"


class TraceError(ValueError):
    """A folder that holds no finished trace, or one that it should not hold."""


@dataclass(frozen=True)
class TracedText:
    """One text and what the target computed for each of its T tokens, the last one included."""

    input_ids: torch.Tensor
    """[T] int32: the prompt, then the answer."""
    loss_mask: torch.Tensor
    """[T] uint8: 1 for tokens of the answer."""
    target_hidden_states: torch.Tensor
    """[T, layers * hidden]: of each target layer, ascending and side by side, the mean of the streams that enter it."""
    target_last_hidden_states: torch.Tensor
    """[T, hidden]: after the final norm; times the head they are the target's logits for the next token."""


def bytes_per_token(layers: int, hidden_size: int, element_bytes: int) -> int:
    """What one token takes on disk."""
    return (layers + 1) * hidden_size * element_bytes + 4


def write_text(
    directory: Path, number: int, request: str, ids: torch.Tensor, states: torch.Tensor, last: torch.Tensor
) -> int:
    """Write one text, whole or not at all, and return its bytes; see `TracedText` for shapes. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = directory / f"text-{number:06d}{SUFFIX}"
    beside = path.with_suffix(".part")
    tensors = {
        "input_ids": ids.to(torch.int32),
        "target_hidden_states": states.contiguous(),
        "target_last_hidden_states": last.contiguous(),
    }
    try:
        save_file(tensors, beside, metadata={"schema": SCHEMA, "request": request})
        os.replace(beside, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    finally:
        beside.unlink(missing_ok=True)
    return path.stat().st_size


def write_manifest(
    directory: Path, checkpoint: str, layers: Sequence[int], hidden_size: int, texts: list[dict[str, Any]]
) -> None:
    """Finish a trace. texts: {"file", "prompt", "tokens", "answer_from"} each. Raises OSError."""
    value = {
        "schema": SCHEMA,
        "checkpoint": checkpoint,
        "target_layer_ids": list(layers),
        "hidden_size": hidden_size,
        "tokens": sum(text["tokens"] for text in texts),
        "texts": texts,
    }
    beside = directory / f".{MANIFEST}"
    beside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(beside, directory / MANIFEST)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What `write_manifest` wrote. Raises TraceError."""
    try:
        value: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        if value["schema"] != SCHEMA:
            raise ValueError(f"its schema is {value['schema']!r}, this reads {SCHEMA!r}")
    except OSError as error:
        raise TraceError(f"{directory / MANIFEST}: {error.strerror}; `deepinfer dspark-trace` writes it last") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{directory / MANIFEST} is no trace's: {error}") from None
    return value


def read(directory: Path) -> Iterator[TracedText]:
    """The texts of a finished trace, in order. Raises TraceError; one text is in memory at a time."""
    for text in read_manifest(directory)["texts"]:
        yield read_text(directory, text)


def read_text(directory: Path, text: dict[str, Any]) -> TracedText:
    """One text of the manifest's `texts`. Raises TraceError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(directory / text["file"])
        ids = tensors["input_ids"]
        loss_mask = (torch.arange(len(ids)) >= text["answer_from"]).to(torch.uint8)
        return TracedText(ids, loss_mask, tensors["target_hidden_states"], tensors["target_last_hidden_states"])
    except (OSError, SafetensorError, KeyError) as error:
        raise TraceError(f"{directory / str(text.get('file'))} is no text of a trace: {error!r}") from None


def requests(directory: Path) -> dict[str, tuple[str, int]]:
    """Of the files that engines left in a folder: the request's id, by it the file's name and the number of tokens."""
    from safetensors import safe_open

    found = {}
    for path in sorted(directory.glob(f"text-*{SUFFIX}")):
        with safe_open(path, "pt") as file:
            found[file.metadata()["request"]] = (path.name, file.get_slice("input_ids").get_shape()[0])
    return found
