"""Which weights an engine runs: a name under which two engines may share KV blocks."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES_PER_FILE = 128
PAGE_BYTES = 4096
MAX_HEADER_BYTES = 100 << 20
"""As the safetensors library has it."""
WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def weights_digest(model: Any) -> str:
    """The revision of a hub snapshot, else a digest of the files' headers, sizes and sampled pages."""
    path = _directory(model)
    if (snapshot := re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", str(path))) is not None:
        return f"hub:{snapshot[1]}"
    if not path.is_dir():
        return f"name:{model.model}@{model.revision or ''}"
    return f"files:{directory_digest(path)}"


def directory_digest(directory: Path, always: Callable[[str], bool] = lambda name: False) -> str:
    """Of config.json and every weight file: name, size, header, and a page in the middle of each of up to
    `SAMPLES_PER_FILE` tensors, evenly chosen, and of every tensor that is `always` read. Training moves all of them; an
    edit of a few tensors of a large file may escape it, as may one that fits between pages: name such weights. Raises
    OSError."""
    digest = hashlib.sha256((directory / "config.json").read_bytes() if (directory / "config.json").exists() else b"")
    for file in sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_FILES):
        size = file.stat().st_size
        digest.update(f"\n{file.name} {size}\n".encode())
        descriptor = os.open(file, os.O_RDONLY)
        try:
            header = _header(descriptor, size) if file.suffix == ".safetensors" else b""
            digest.update(header)
            for offset in _sampled(header, size, always):
                digest.update(os.pread(descriptor, PAGE_BYTES, offset))
        finally:
            os.close(descriptor)
    return digest.hexdigest()


def config_digest(vllm_config: Any) -> str:
    """Digest of the config that is in effect, overrides included, and of what else makes weights other weights."""
    model = vllm_config.model_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    text = json.dumps(
        [config, model.quantization, str(vllm_config.load_config.load_format == "dummy")], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _directory(model: Any) -> Path:
    """Where the checkpoint lies: the path given, or the cached snapshot of a hub's name."""
    path = Path(model.model)
    if path.is_dir():
        return path.resolve()
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(cached).parent if isinstance(cached, str) else path


def _header(descriptor: int, size: int) -> bytes:
    """The JSON header of a safetensors file; empty where there is none."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    return os.pread(descriptor, length, 8) if length <= min(size, MAX_HEADER_BYTES) else b""


def _sampled(header: bytes, size: int, always: Callable[[str], bool]) -> list[int]:
    """Offsets of the pages to read: of tensors where the header tells them, else evenly over the file."""
    try:
        tensors = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"}
        middles = sorted((8 + len(header) + (begin + end) // 2, name) for name, (begin, end) in tensors.items())
    except (ValueError, TypeError, KeyError, AttributeError):
        middles = [(offset, "") for offset in range(0, size, max(PAGE_BYTES, size // SAMPLES_PER_FILE))]
    step = max(1, -(-len(middles) // SAMPLES_PER_FILE))
    chosen = [middle for number, (middle, name) in enumerate(middles) if number % step == 0 or always(name)]
    return [max(0, middle - PAGE_BYTES // 2) for middle in chosen]
