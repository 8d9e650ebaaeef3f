"""A calibration comes back as it was written, and never reaches an engine that it was not made for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.spec_decode import chosen_calibration
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.calibration_file import (
    MAX_BYTES,
    NAME,
    CalibrationFileError,
    Made,
    checkpoint_digest,
    load,
    read,
    write,
)
from deepinfer_vllm.spec_decode.made import made_for

CALIBRATION = Calibration((1.5, 0.75), (0.08, 0.06), (0.01, 0.02), (5000, 4000), "a note")
MADE = Made("0123456789abcdef" * 4, 2, "bfloat16", "plain", "greedy")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    write(path, CALIBRATION, MADE)
    return path


def loaded(path: Path, made: Made = MADE) -> tuple[Calibration, list[str]]:
    said: list[str] = []
    return load(path, made, said.append), said


def test_it_comes_back(path: Path) -> None:
    assert read(path) == (CALIBRATION, MADE)
    assert loaded(path) == (CALIBRATION, [])
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, Calibration.identity(2), MADE)
    assert read(path)[0] == CALIBRATION and list(path.parent.iterdir()) == [path]


def test_of_another_checkpoint(path: Path) -> None:
    found, said = loaded(path, Made("f" * 64, 2))
    assert found == Calibration.identity(2)
    assert said == [
        f"{path} is of another checkpoint (digest 0123456789ab..., this one has ffffffffffff...); the draft's"
        " confidences are used as the checkpoint gives them. Run `deepinfer calibrate-dspark` for this checkpoint and"
        " block size."
    ]


def test_of_another_block_size(path: Path) -> None:
    found, said = loaded(path, Made(MADE.checkpoint, 5))
    assert found == Calibration.identity(5)
    assert (
        len(said) == 1
        and "of drafts of 2 tokens, this engine drafts 5 (num_speculative_tokens); the draft's" in said[0]
    )


def test_of_drafts_drawn_otherwise(path: Path) -> None:
    found, said = loaded(path, replace(MADE, draft_sample_method="probabilistic"))
    assert found == Calibration.identity(2) and len(said) == 1
    assert "is of greedy drafts, this engine makes probabilistic ones (draft_sample_method); the draft's" in said[0]


def test_of_other_arithmetic_is_used(path: Path) -> None:
    found, said = loaded(path, Made(MADE.checkpoint, 2, "float32", "qat"))
    assert found == CALIBRATION
    assert said == [
        f"{path} was fitted with dtype bfloat16, this engine runs float32: it is used, as they differ little."
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": "deepinfer.dspark-calibration/2"}, "its schema is not"),
        ({"temperatures": [1.5]}, "1 temperatures for 2 positions"),
        ({"temperatures": [1.5, 0]}, "one positive number a draft position"),
        ({"temperatures": [1.5, "1"]}, "are not all numbers"),
        ({"temperatures": [1.5, True]}, "are not all numbers"),
        ({"temperatures": [1.5, float("nan")]}, "one positive number a draft position"),
        ({"temperatures": 1.5}, "is no list"),
        ({"positions": "2"}, "is no int"),
        ({"checkpoint": None}, "is no str"),
        ({"outcomes": [float("inf"), 1]}, "infinity"),
    ],
)
def test_what_cannot_be_a_calibration(path: Path, change: dict[str, Any], reason: str) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found, said = loaded(path)
    assert found == Calibration.identity(2)
    assert len(said) == 1 and said[0].startswith(f"{path} is no calibration: ") and reason in said[0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (MAX_BYTES + 1)])
def test_garbage(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found, said = loaded(path)
    assert found == Calibration.identity(2)
    assert len(said) == 1 and "is no calibration" in said[0] and "\n" not in said[0]


def test_a_field_too_few(path: Path) -> None:
    value = json.loads(path.read_text())
    del value["note"]
    path.write_text(json.dumps(value))
    with pytest.raises(CalibrationFileError, match="is no calibration: no 'note'"):
        read(path)


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(CalibrationFileError, match="nowhere.json: No such file or directory"):
        read(tmp_path / "nowhere.json")
    os.mkfifo(pipe := tmp_path / "pipe")
    os.symlink(loop := tmp_path / "loop", loop)
    for path, reason in ((tmp_path, "no regular file"), (pipe, "no regular file"), (loop, "symbolic links")):
        found, said = loaded(path)
        assert found == Calibration.identity(2)
        assert len(said) == 1 and reason in said[0]


@contextmanager
def another_user() -> Iterator[Path]:
    """A directory that everybody may search, while this thread's process may read what others may: root can else read
    all."""
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        root = os.geteuid() == 0
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)
            os.chmod(name, 0o755)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_of_another_user() -> None:
    """A file, and a directory, that this one may not read: confidences as they are, and one line."""
    with another_user() as directory:
        write(path := directory / NAME, CALIBRATION, MADE)
        path.chmod(0o000)
        become_nobody()
        found, said = loaded(path)
    assert found == Calibration.identity(2)
    assert len(said) == 1 and said[0].startswith(f"{path}: Permission denied; the draft's confidences are used")
    with another_user() as directory:
        write(path := directory / NAME, CALIBRATION, MADE)
        directory.chmod(0o000)
        become_nobody()
        found, said = loaded(path)
    assert found == Calibration.identity(2) and len(said) == 1 and "Permission denied" in said[0]


def test_an_engine_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks beside the checkpoint, whose directory it may not search; a file that it may read is taken."""
    said: list[str] = []
    monkeypatch.setattr(chosen_calibration.logger, "warning", lambda text, *of: said.append(text % of if of else text))
    speculative = SimpleNamespace(num_speculative_tokens=2, draft_sample_method="greedy")
    with another_user() as directory:
        create(directory, layers=4, shards=1)
        model = SimpleNamespace(model=str(directory), revision=None, dtype=torch.bfloat16)
        config = SimpleNamespace(model_config=model, speculative_config=speculative)
        write(directory / NAME, CALIBRATION, replace(made_for(config), numerics=""))
        for file in directory.iterdir():
            file.chmod(0o644)
        become_nobody()
        assert chosen_calibration.load_calibration("auto", config) == CALIBRATION and said == []
        if os.getuid() == 0:
            os.seteuid(0)
        directory.chmod(0o000)
        become_nobody()
        assert chosen_calibration.load_calibration("auto", config) is None
    assert len(said) == 1 and "No calibration is used" in said[0] and "Permission denied" in said[0]


def test_each_tensor_of_the_draft_counts_and_training_of_the_target(tmp_path: Path) -> None:
    create(tmp_path, layers=4, shards=1)
    digests = [checkpoint_digest(tmp_path)]
    write(tmp_path / NAME, CALIBRATION, MADE)  # lies beside the weights and is none
    assert checkpoint_digest(tmp_path) == digests[0]
    (file,) = tmp_path.glob("model*.safetensors")
    names = [n for n in load_file(file) if n.startswith("mtp.") and ".experts." not in n]
    assert any("confidence_head" in n for n in names) and any("markov_head" in n for n in names)
    for name in names:
        tensors = load_file(file)
        raw = tensors[name].view(torch.uint8).flatten()
        raw[len(raw) // 2] ^= 1
        save_file(tensors, file, metadata={"format": "pt"})
        digests.append(checkpoint_digest(tmp_path))
    tensors = load_file(file)
    trained = {n: t if n.startswith("mtp.") else t.view(torch.uint8) ^ 1 for n, t in tensors.items()}
    save_file({n: t.view(tensors[n].dtype) for n, t in trained.items()}, file, metadata={"format": "pt"})
    digests.append(checkpoint_digest(tmp_path))
    assert len({*digests}) == len(digests)
