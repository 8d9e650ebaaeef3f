"""Names of weights: the same for the same bytes, wherever they lie, and another for others."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_vllm.kv_connector.weights_digest import config_digest, directory_digest, weights_digest
from engine.llama import write_llama


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny llama."""
    return write_llama(tmp_path / "llama")


def test_a_copy_has_the_same_digest(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "elsewhere" / "x")
    assert directory_digest(copy) == directory_digest(checkpoint)
    (copy / "README.md").write_text("not weights")
    assert directory_digest(copy) == directory_digest(checkpoint)


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.norm", "model.layers.1.mlp.down_proj"])
def test_every_tensor_of_a_small_file_counts(checkpoint: Path, name: str) -> None:
    before = directory_digest(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[f"{name}.weight"] *= 1.5
    save_file(tensors, checkpoint / "model.safetensors")
    assert directory_digest(checkpoint) != before


def test_config_names_and_shapes_count(checkpoint: Path) -> None:
    digests = {directory_digest(checkpoint)}
    (checkpoint / "config.json").write_text("{}")
    digests.add(directory_digest(checkpoint))
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    digests.add(directory_digest(checkpoint))
    save_file({"a": torch.zeros(4)}, checkpoint / "extra.safetensors")
    digests.add(directory_digest(checkpoint))
    save_file({"b": torch.zeros(4)}, checkpoint / "extra.safetensors")
    digests.add(directory_digest(checkpoint))
    assert len(digests) == 5


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 8, (10).to_bytes(8, "little") + b"not JSON..", b"[]" * 9])
def test_what_is_no_safetensors_file_is_sampled(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    (tmp_path / "pickled.bin").write_bytes(content * 5000)
    before = directory_digest(tmp_path)
    (tmp_path / "pickled.bin").write_bytes(b"y" + (content * 5000)[1:])
    assert content[:1] in (b"", b"y") or directory_digest(tmp_path) != before


def model(path: Path, **config: Any) -> Any:
    values = {"_name_or_path": str(path), "transformers_version": "5", "rope_theta": 1e4} | config
    hf_config = SimpleNamespace(to_dict=lambda: values)
    return SimpleNamespace(model=str(path), revision=None, quantization=None, hf_config=hf_config)


def test_a_hub_snapshot_is_named_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    path = tmp_path / "models--a--b" / "snapshots" / commit
    path.mkdir(parents=True)
    assert weights_digest(model(path)) == f"hub:{commit}"


def test_overrides_make_other_weights(tmp_path: Path) -> None:
    def digest(path: str, load_format: str = "auto", **config: Any) -> str:
        load = SimpleNamespace(load_format=load_format)
        return config_digest(SimpleNamespace(model_config=model(Path(path), **config), load_config=load))

    assert digest("a") == digest("b") == digest("a", transformers_version="6", load_format="safetensors")
    assert len({digest("a"), digest("a", rope_theta=5e4), digest("a", load_format="dummy")}) == 3
