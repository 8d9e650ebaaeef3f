"""Quantised tensors that do not fit their scales are told from the headers, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_vllm.checkpoint.bare import BareModel
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import QuantisedMatrix
from deepinfer_vllm.models.deepseek_v41.quantised_shards import check_quantised

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v41-tiny-a-fp8"
LINEAR, EXPERT = "layers.1.attn.wkv", "layers.2.ffn.experts.3.w2"
TABLE = "layers.1.engram.embed"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    return load_file(GOLDEN / "model.safetensors")


def write(directory: Path, tensors: Tensors) -> Path:
    for file in GOLDEN.glob("*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    save_file(tensors, directory / "model.safetensors")
    return directory


def logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model = BareModel(directory)
    try:
        return model.prefill(ids).logits
    finally:
        model.close()


def test_the_published_form_passes() -> None:
    check_quantised(GOLDEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{LINEAR}.scale": None}, f"1 quantised weights .*{LINEAR}.weight is F8_E4M3 and has no scale beside it"),
        ({f"{EXPERT}.scale": None}, f"{EXPERT}.weight is I8 and has no scale"),
        ({f"{LINEAR}.scale": torch.zeros(2, 4)}, f"the scale of {LINEAR}.weight is F32, not F8_E8M0"),
        ({f"{LINEAR}.scale": torch.zeros(2, 3, dtype=torch.uint8)}, r"has shape \[2, 3\], .* cover \[64, 128\] by 32"),
        ({f"{EXPERT}.scale": torch.zeros(1, 1, dtype=torch.uint8)}, rf"{EXPERT}.*cover \[128, 32\] by 32"),
        (
            {f"{LINEAR}.weight": torch.zeros(64, dtype=torch.uint8)},
            r"wkv.weight has shape \[64\], not that of a ma",
        ),
        ({f"{TABLE}.scale": None}, f"{TABLE}.weight is F8_E4M3 and has no scale"),
    ],
)
def test_what_does_not_fit_is_told_early(
    tensors: Tensors, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    changed = {k: v for k, v in (tensors | changes).items() if v is not None}
    write(tmp_path, changed)
    with pytest.raises(CheckpointError, match=message):
        check_quantised(tmp_path)
    with pytest.raises(ValueError, match=message):  # vLLM's config wraps it
        BareModel(tmp_path)


def test_a_long_list_is_cut(tensors: Tensors, tmp_path: Path) -> None:
    write(tmp_path, {name: t for name, t in tensors.items() if not name.endswith(".scale")})
    with pytest.raises(CheckpointError) as error:
        check_quantised(tmp_path)
    assert str(error.value).count("has no scale") == 5 and "; …. Fetch" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{LINEAR}.scale", 255, rf"1 that do not fit: {LINEAR}\.weight \(scale byte 255: NaN\)"),
        (f"{EXPERT}.scale", 255, rf"{EXPERT}\.weight \(scale byte 255: NaN\)"),
        (f"{LINEAR}.weight", 0x7F, rf"{LINEAR}\.weight \(weight holds e4m3 NaN\)"),
    ],
)
@pytest.mark.parametrize("weights", ["packed", "bf16"])
def test_nan_is_told_by_name(
    tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int, message: str, weights: str
) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_WEIGHTS", weights)
    tensors[name].view(torch.uint8)[0, 0] = value
    with pytest.raises(CheckpointError, match=message):
        BareModel(write(tmp_path, tensors))


@pytest.mark.parametrize("weights", ["packed", "bf16"])
def test_experts_may_be_fp8(tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    """expert_dtype fp8: the values of fp4 experts as e4m3 codes under the same scales."""
    monkeypatch.setenv("DEEPINFER_VLLM_WEIGHTS", weights)
    ids = torch.arange(40) + 5
    right = logits(write(tmp_path, tensors), ids)
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
        scale = tensors[f"{name.removesuffix('.weight')}.scale"]
        ones = torch.full(scale.shape, 127, dtype=torch.uint8)
        tensors[name] = QuantisedMatrix.published(tensors[name], ones).widen().to(torch.float8_e4m3fn)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["expert_dtype"] = "fp8"
    write(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(tmp_path, ids), right, rtol=0, atol=0)


@pytest.mark.parametrize("weights", ["packed", "bf16"])
def test_some_linears_may_be_plain(
    tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """A checkpoint may leave what it likes in bf16."""
    monkeypatch.setenv("DEEPINFER_VLLM_WEIGHTS", weights)
    ids = torch.arange(40) + 5
    right = logits(write(tmp_path, tensors), ids)
    tensors[f"{LINEAR}.weight"] = QuantisedMatrix.published(
        tensors[f"{LINEAR}.weight"], tensors.pop(f"{LINEAR}.scale")
    ).widen(torch.bfloat16)
    torch.testing.assert_close(logits(write(tmp_path, tensors), ids), right, rtol=0, atol=2e-4)
