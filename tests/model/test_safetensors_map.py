"""Tensors mapped from the checkpoint: found, exact, and not in memory until they are touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.models.deepseek_v41.safetensors_map import find_shard, map_tensor, stored_tensors
from small_model import normal

INDEX = "model.safetensors.index.json"


def two_shards(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {
        "a": normal(1, 5, 3),
        "b": normal(2, 4, 2).bfloat16(),
        "c": normal(3, 7).half(),
        "d": normal(4, 2, 2, 2).to(torch.float8_e4m3fn),
        "e": torch.arange(6, dtype=torch.uint8).view(2, 3),
    }
    save_file({k: tensors[k] for k in "ab"}, directory / "model-00001-of-00002.safetensors")
    save_file({k: tensors[k] for k in "cde"}, directory / "model-00002-of-00002.safetensors")
    return tensors


@pytest.mark.parametrize("indexed", [True, False])
def test_every_tensor_is_found_and_exact(tmp_path: Path, indexed: bool) -> None:
    tensors = two_shards(tmp_path)
    if indexed:
        files = {k: f"model-0000{1 + (k in 'cde')}-of-00002.safetensors" for k in tensors}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    for name, expected in tensors.items():
        shard = find_shard(tmp_path, name)
        assert shard is not None and shard.name.startswith(f"model-0000{1 + (name in 'cde')}")
        mapped = map_tensor(shard, name)
        assert mapped.dtype == expected.dtype and torch.equal(mapped.float(), expected.float())
    assert find_shard(tmp_path, "nowhere") is None


def test_other_files_are_not_searched(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "golden.safetensors")
    assert find_shard(tmp_path, "a") is None


def test_the_index_decides(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00009-of-00009.safetensors"}}))
    assert find_shard(tmp_path, "a") == tmp_path / "model-00009-of-00009.safetensors"
    assert find_shard(tmp_path, "b") is None


def test_an_index_that_points_to_another_shard(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    shard = find_shard(tmp_path, "a")
    assert shard is not None
    with pytest.raises(CheckpointError, match=r"00002\.safetensors does not hold a, though the index says so\. Fetch"):
        map_tensor(shard, "a")


@pytest.mark.parametrize(
    ("keep_bytes", "message"),
    [
        (0, r"00002\.safetensors ends within its header \(0 bytes\)\. Fetch"),
        (5, "ends within its header"),
        (40, "ends within its header"),
        (-1, r"00002\.safetensors has \d+ bytes, its header says \d+\. Fetch"),
    ],
)
def test_a_shard_cut_off_is_named(tmp_path: Path, keep_bytes: int, message: str) -> None:
    two_shards(tmp_path)
    stored_tensors(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with pytest.raises(CheckpointError, match=message):
        stored_tensors(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        map_tensor(file, "d")


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs\n" * 9, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{x"]
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors (has no|ends within its) .*header .*Fetch the file again"
    ):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("content", ["{oops", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is not an index of shards .*Fetch it again"):
        find_shard(tmp_path, "a")


def test_a_dtype_that_cannot_be_mapped(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"table": torch.zeros(2, 2).long()}, file)
    with pytest.raises(ValueError, match=r"model\.safetensors: table has dtype I64; only BF16, F16, F32, F8_E4M3"):
        map_tensor(file, "table")


def test_writing_does_not_reach_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    map_tensor(file, "a").fill_(1)
    assert not bool(map_tensor(file, "a").any())


def resident_bytes() -> int:
    """Memory that this process has in use, mapped files included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_large_table_takes_no_memory_but_for_the_rows_read(tmp_path: Path) -> None:
    rows, width = 1 << 20, 128  # 256 MB of bf16, a hole in the file but for three rows
    size = rows * width * 2
    header = json.dumps({"t": {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    written = {
        0: normal(1, width).bfloat16(),
        777_777: normal(2, width).bfloat16(),
        rows - 1: normal(3, width).bfloat16(),
    }
    file = tmp_path / "model.safetensors"
    with file.open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        for row, values in written.items():
            f.seek(8 + len(header) + row * width * 2)
            f.write(values.view(torch.uint8).numpy().tobytes())
        f.truncate(8 + len(header) + size)
    before = resident_bytes()
    table = map_tensor(file, "t")
    assert table.shape == (rows, width)
    assert resident_bytes() - before < size / 10
    got = table[torch.tensor([*written, 5])]
    assert torch.equal(got, torch.stack([*written.values(), torch.zeros(width).bfloat16()]))
    assert resident_bytes() - before < size / 10
