"""Traces of expert loads on disk: .npz with `counts` [T, L, E] int32 and `meta`, a JSON object."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_kvstore.whole_file import replacing
from deepinfer_vllm.eplb.errors import EplbError

MAX_BYTES = 1 << 30
"""Unpacked: four times what an engine records at most."""


@dataclass(frozen=True)
class LoadTrace:
    """What a running model's routers chose."""

    counts: Any
    """[T, L, E] int32: steps, expert layers, logical experts; each token counts once for each expert it goes to."""
    meta: dict[str, Any]
    """Where it is from, as its writer says: model, ranks, physical, nodes, tokens a step and so on."""


def write(path: Path, counts: Any, meta: dict[str, Any]) -> None:
    """Write a trace whole or not at all. Raises OSError, and EplbError for counts that `read` would refuse."""
    whole = np.ascontiguousarray(_checked(np.asarray(counts), str(path)), dtype=np.int32)
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, counts=whole, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8))


def read(path: Path) -> LoadTrace:
    """Read a trace. Raises OSError, and EplbError for a file that is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > MAX_BYTES:
            raise EplbError(f"{path}: unpacks to {unpacked:,} bytes, above {MAX_BYTES:,}; record fewer steps")
        with np.load(path, allow_pickle=False) as stored:
            missing = {"counts", "meta"} - set(stored.files)
            if missing:
                raise EplbError(f"{path}: no array named {min(missing)}: not a trace of expert loads")
            counts, raw = stored["counts"], stored["meta"]
            if not isinstance(counts, np.ndarray) or not isinstance(raw, np.ndarray):
                raise EplbError(f"{path}: counts and meta are not both arrays: not a trace of expert loads")
        meta = json.loads(raw.tobytes())
    except EplbError:
        raise
    except Exception as error:  # zipfile, its decompressors, numpy's headers and json each have errors of their own
        if isinstance(error, OSError) and error.errno is not None:  # bz2's has none
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise EplbError(f"{path}: not a trace of expert loads: {why}") from None
    if not isinstance(meta, dict):
        raise EplbError(f"{path}: meta is a {type(meta).__name__}, not an object")
    return LoadTrace(_checked(counts, str(path)), meta)


def _checked(counts: Any, path: str) -> Any:
    if counts.ndim != 3 or 0 in counts.shape:
        raise EplbError(f"{path}: counts have shape {list(counts.shape)}; wanted [steps, layers, experts]")
    if counts.dtype.kind not in "iu":
        raise EplbError(f"{path}: counts are {counts.dtype}; wanted whole numbers of tokens")
    low, high = int(counts.min()), int(counts.max())
    if low < 0 or high > np.iinfo(np.int32).max:
        raise EplbError(f"{path}: counts reach from {low} to {high}; wanted 0 to {np.iinfo(np.int32).max}")
    return counts.astype(np.int32)
