"""Recorded drafts come back, whatever else befalls the file, and no disk gets in the way of a step."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from deepinfer_vllm.spec_decode import records
from deepinfer_vllm.spec_decode.calibration_file import Made
from deepinfer_vllm.spec_decode.records import Recorder, read

MADE = Made("c" * 64, 3, "float32", "plain")


def batch(seed: int, count: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    drafted = rng.integers(1, 4, count)
    return rng.random((count, 3), np.float32), drafted, rng.integers(0, drafted + 1), [f"r{i}" for i in range(count)]


def write(path: Path, *batches: tuple, made: Made = MADE, limit_bytes: int = 1 << 20) -> list[str]:
    """What the recorder said."""
    said: list[str] = []
    recorder = Recorder(path, made, said.append, limit_bytes=limit_bytes)
    for b in batches:
        recorder.record(*b)
    recorder.close()
    return said


def test_what_was_recorded_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "records"
    assert write(path, batch(1), batch(2)) == []
    assert write(path, batch(3)) == []  # an engine started again
    (made,), (found,) = read(path).keys(), read(path).values()
    assert made == MADE
    for name, index in (("confidences", 0), ("drafted", 1), ("accepted", 2)):
        want = np.concatenate([batch(seed)[index] for seed in (1, 2, 3)])
        assert getattr(found, name).tolist() == want.tolist()
    assert found.requests.tolist() == found.requests[:5].tolist() * 3 and len({*found.requests.tolist()}) == 5


def test_drafts_of_which_nothing_was_verified_are_left_out(tmp_path: Path) -> None:
    confidences = np.full((2, 3), 0.5)
    write(tmp_path / "records", (confidences, np.array([0, 2]), np.array([0, 1]), ["a", "b"]))
    assert read(tmp_path / "records")[MADE].drafted.tolist() == [2]


def test_what_they_are_of_is_kept_apart(tmp_path: Path) -> None:
    other = Made("d" * 64, 3)
    write(tmp_path / "records", batch(1))
    write(tmp_path / "records", batch(2), batch(3), made=other)
    assert {made: len(found.drafted) for made, found in read(tmp_path / "records").items()} == {MADE: 5, other: 10}


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "records"
    write(path, batch(1))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[flipped.index(b'"rows"') + 12] ^= 1
    value = json.loads(whole)
    foreign = [
        value | {"schema": "x"},
        value | {"positions": 2},
        value | {"checkpoint": []},
        {"schema": value["schema"]},
        3,
    ]
    foreign.append(value | {"positions": None})
    path.write_bytes(
        whole[: len(whole) // 2]  # killed while writing
        + whole
        + bytes(flipped)
        + b"\xff\x00\n" * 3
        + b"".join(json.dumps(v).encode() + b"\n" for v in foreign)
        + whole
        + whole[:40]
    )
    assert read(path).keys() == {MADE}
    assert read(path)[MADE].accepted.tolist() == batch(1)[2].tolist() * 2


def test_impossible_rows_are_passed_over(tmp_path: Path) -> None:
    confidences, drafted, accepted, names = batch(1)
    confidences[0, 0], confidences[1, 1], confidences[2, 2] = np.nan, 1.5, -0.5
    drafted[3], accepted[4] = 4, drafted[4] + 1
    write(tmp_path / "records", (confidences, drafted, accepted, names), batch(2))
    assert read(tmp_path / "records")[MADE].drafted.tolist() == batch(2)[1].tolist()


def test_a_file_does_not_grow_past_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "records"
    assert write(path, batch(1), limit_bytes=1000) == []
    size = path.stat().st_size
    said = write(path, batch(2, count=40), limit_bytes=1000)
    assert path.stat().st_size == size
    assert said == [
        f"Drafts that {path} should record are lost: it has its 0 MiB; fit from it, and delete it to go on."
        " Generation goes on."
    ]
    path.unlink()
    assert write(path, batch(3), limit_bytes=1000) == []
    assert read(path)[MADE].drafted.tolist() == batch(3)[1].tolist()


def test_a_disk_that_fails_is_named_once(tmp_path: Path) -> None:
    said: list[str] = []
    recorder = Recorder(tmp_path, MADE, said.append)  # a directory
    recorder.record(*batch(1))
    recorder.close()
    assert said == [
        f"Drafts that {tmp_path} should record are lost: Is a directory; free its disk, or name another file."
        " Generation goes on."
    ]


def test_a_disk_that_hangs_costs_rows_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, release = threading.Event(), threading.Event()
    real = os.write

    def hang(descriptor: int, data: bytes) -> int:
        stuck.set()
        release.wait()
        return real(descriptor, data)

    monkeypatch.setattr(records, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr("os.write", hang)
    said: list[str] = []
    recorder = Recorder(tmp_path / "records", MADE, said.append)
    recorder.record(*batch(1))
    assert stuck.wait(60)
    for _ in range(100):
        recorder.record(*batch(2, count=1000))
    assert 0.9 * records.WAITING_BYTES < len(recorder._waiting) <= records.WAITING_BYTES
    assert len(said) == 1 and "its disk does not keep up" in said[0]
    recorder.close(timeout_seconds=0.01)
    release.set()
    recorder.close(timeout_seconds=60)
    found = read(tmp_path / "records")[MADE]
    assert found.drafted[:5].tolist() == batch(1)[1].tolist() and len(found.drafted) > 50_000


def _engine(path: Path, seed: int) -> None:
    recorder = Recorder(path, MADE, print)
    for step in range(50):
        recorder.record(*batch(1000 * seed + step))
        recorder._closing.wait(0.002)
    recorder.close()


def test_several_engines_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "EVERY_SECONDS", 0.005)
    fork = multiprocessing.get_context("fork")
    engines = [fork.Process(target=_engine, args=(tmp_path / "records", seed)) for seed in range(4)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()
        assert engine.exitcode == 0
    found = read(tmp_path / "records")[MADE]
    want = np.concatenate([batch(1000 * seed + step)[0] for seed in range(4) for step in range(50)])
    assert sorted(found.confidences.tolist()) == sorted(want.tolist())
