"""Weights into the published quantised formats: rounding and scales by hand, and checkpoints that the model reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.checkpoint.quantise import CONFIG, quantised, to_e2m1, to_e4m3
from deepinfer_vllm.cli.checkpoint import app
from deepinfer_vllm.cli.main import run
from reference import load
from reference.dequantise import dequantise
from small_model import normal

GOLDEN = Path(__file__).parent / "golden"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()  # code 127 is NaN


def back(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantise({"x.weight": codes, "x.scale": scale})["x.weight"]


def nearest(value: float, grid: list[float]) -> float:
    """The nearest entry with the value's sign; of two equally near, the one of even code."""
    best = min(range(len(grid)), key=lambda code: (abs(abs(value) - grid[code]), code % 2))
    return math.copysign(grid[best], value)


def by_hand(block: torch.Tensor, grid: list[float]) -> list[list[float]]:
    """A block [n, k] with one scale, each value by trying all codes."""
    exponent = -126
    while float(block.abs().max()) / 2.0**exponent > grid[-1]:
        exponent += 1
    return [[nearest(v / 2.0**exponent, grid) * 2.0**exponent for v in row] for row in block.tolist()]


@pytest.mark.parametrize("size", [1e-6, 0.02, 1.0, 3e4])
@pytest.mark.parametrize("shape", [(64, 64), (40, 72), (3, 10)])
def test_linears_block_by_block(shape: tuple[int, int], size: float) -> None:
    values = normal(1, *shape) * size
    codes, scale = to_e4m3(values, rows=32)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    assert tuple(scale.shape) == (-(-shape[0] // 32), -(-shape[1] // 32))
    got = back(codes, scale)
    for i in range(0, shape[0], 32):
        for j in range(0, shape[1], 32):
            part = (slice(i, i + 32), slice(j, j + 32))
            assert got[part].tolist() == by_hand(values[part], E4M3)


@pytest.mark.parametrize("size", [1e-6, 0.02, 1.0, 3e4])
@pytest.mark.parametrize("shape", [(4, 64), (3, 72), (1, 10)])
def test_experts_and_tables_row_by_row(shape: tuple[int, int], size: float) -> None:
    values = normal(2, *shape) * size
    for (codes, scale), grid in ((to_e2m1(values), E2M1), (to_e4m3(values, rows=1), E4M3)):
        assert tuple(scale.shape) == (shape[0], -(-shape[1] // 32))
        got = back(codes, scale)
        for i in range(shape[0]):
            for j in range(0, shape[1], 32):
                assert got[i : i + 1, j : j + 32].tolist() == by_hand(values[i : i + 1, j : j + 32], grid)


def test_halves_go_to_even_codes() -> None:
    halves = [(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)] + [6.0]
    values = torch.tensor([halves + [-v for v in halves]])
    right = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert back(*to_e2m1(values))[0].tolist() == right + [-v for v in right]


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_the_least_power_of_two_that_fits(largest: float) -> None:
    for exponent in (-20, -1, 0, 7):
        exact = torch.full((1, 32), largest * 2.0**exponent)
        for values, expected in ((exact, exponent), (torch.nextafter(exact, torch.tensor(torch.inf)), exponent + 1)):
            _, scale = to_e4m3(values, rows=1) if largest == 448 else to_e2m1(values)
            assert scale.view(torch.uint8).tolist() == [[127 + expected]]


def test_zeros_and_tiny_values() -> None:
    for codes, scale in (to_e2m1(torch.zeros(2, 32)), to_e4m3(torch.zeros(2, 32), rows=32)):
        assert not bool(back(codes, scale).any()) and set(scale.view(torch.uint8).flatten().tolist()) == {127}
    codes, scale = to_e4m3(torch.full((1, 32), 1e-44), rows=1)
    assert scale.view(torch.uint8).tolist() == [[0]] and bool(back(codes, scale).isfinite().all())


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="33 columns: .* the number must be even"):
        to_e2m1(torch.zeros(2, 33))


def test_quantised_again_nothing_changes() -> None:
    """The golden checkpoint's own codes and scales come out of its values, where a block's largest value is large."""
    tensors = load_file(GOLDEN / "v41-tiny-a-fp8" / "model.safetensors")
    for name in ("layers.2.attn.wq_b", "layers.3.ffn.experts.1.w3", "layers.1.engram.embed", "layers.4.engram.wkv"):
        values = back(tensors[f"{name}.weight"], tensors[f"{name}.scale"])
        again = quantised(f"{name}.weight", values)
        assert torch.equal(back(again[f"{name}.weight"], again[f"{name}.scale"]), values)


def test_names_types_and_shapes_are_the_published_ones(tmp_path: Path) -> None:
    from deepinfer_vllm.checkpoint.writer import write_checkpoint

    golden = GOLDEN / "v41-tiny-a-fp8"
    config = json.loads((golden / "config.json").read_text())
    assert config["quantization_config"] == CONFIG
    write_checkpoint(tmp_path, config, shards=3)

    def described(directory: Path) -> dict[str, tuple[str, list[int]]]:
        found = {}
        for file in directory.glob("model*.safetensors"):
            with safe_open(file, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    part = shard.get_slice(name)
                    found[name] = (part.get_dtype(), part.get_shape())
        return found

    assert described(tmp_path) == described(golden)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`checkpoint tiny --quant` with golden values from the reference, so that `checkpoint verify` can judge it."""
    directory = tmp_path_factory.mktemp("quant")
    result = CliRunner().invoke(app, ["tiny", str(directory), "--quant", "--shards", "3"])
    assert result.exit_code == 0, result.output
    ids = torch.randint(3, 400, (50,), generator=torch.Generator().manual_seed(1))
    out = load(directory).forward(ids.tolist())
    values = {"p0.input_ids": ids, "p0.logits_last8": out.logits[-8:].float().contiguous()}
    save_file(values, directory / "golden_noqat.safetensors")
    files = {"golden_noqat.safetensors": {"tolerance": {"max_abs": 2e-4}}}
    about = {"format_version": 1, "prompt_lengths": [50], "generated_tokens": 0, "files": files}
    (directory / "golden.json").write_text(json.dumps(about))
    return directory


@pytest.mark.parametrize("weights", ["packed", "bf16", "fp32"])
def test_verified_in_every_form(
    tiny: Path, weights: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_WEIGHTS", weights)
    backend = "both" if weights == "packed" else "bare"
    assert run(["checkpoint", "verify", str(tiny), "--backend", backend, "--all"]) == 0
    assert "last logits, max abs" in capsys.readouterr().out


def test_much_smaller_and_as_lively(tiny: Path, tmp_path: Path) -> None:
    plain = create(tmp_path / "plain")
    size = sum(file.stat().st_size for file in tiny.glob("model*.safetensors"))
    assert len(list(tiny.glob("model-*-of-00003.safetensors"))) == 3
    assert size < 0.65 * plain.size_bytes
    reference = load(tiny)
    assert 3 < float(reference.forward([0, 5, 6, 7]).logits.std()) < 5
    assert len(set(reference.greedy([0, 5, 6, 7], 24))) >= 10
