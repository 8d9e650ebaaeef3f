"""Traces are read as written, and whatever else a file holds is one line."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_vllm.cli.main import run
from deepinfer_vllm.eplb import trace
from deepinfer_vllm.eplb.analysis import analyse
from deepinfer_vllm.eplb.errors import EplbError

COUNTS = np.random.default_rng(0).poisson(20, (12, 2, 8)).astype(np.int32)
META = {"ranks": 2, "physical": 10}


def file_of(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def meta_of(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def test_a_trace_is_read_as_written(tmp_path: Path) -> None:
    trace.write(tmp_path / "a.npz", COUNTS.astype(np.int64), META)
    read = trace.read(tmp_path / "a.npz")
    assert (read.counts == COUNTS).all()
    assert read.counts.dtype == np.int32
    assert read.meta == META
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"counts": COUNTS}, "no array named meta"),
        ({"meta": meta_of(META)}, "no array named counts"),
        ({"counts": COUNTS[0], "meta": meta_of(META)}, "shape [2, 8]"),
        ({"counts": COUNTS[:0], "meta": meta_of(META)}, "shape [0, 2, 8]"),
        ({"counts": COUNTS - 100, "meta": meta_of(META)}, "wanted 0 to 2147483647"),
        ({"counts": COUNTS.astype(np.int64) + 2**40, "meta": meta_of(META)}, "wanted 0 to 2147483647"),
        ({"counts": np.full((1, 1, 4), np.nan), "meta": meta_of(META)}, "float64; wanted whole numbers"),
        ({"counts": np.array([[["a"]]]), "meta": meta_of(META)}, "wanted whole numbers"),
        ({"counts": COUNTS, "meta": meta_of([1])}, "meta is a list"),
        ({"counts": COUNTS, "meta": np.array([255, 0, 1], np.uint8)}, "not a trace"),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, arrays: dict[str, np.ndarray], said: str) -> None:
    path = file_of(tmp_path / "a.npz", **arrays)
    with pytest.raises(EplbError) as error:
        trace.read(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_unpacks_to_too_much_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("counts.npy", bytes((1 << 20) + 1))
    with pytest.raises(EplbError, match="unpacks to"):
        trace.read(path)


def test_a_header_that_promises_too_much_is_no_trace(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i4", "fortran_order": False, "shape": (1 << 20, 1 << 20, 99)}
    )
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("counts.npy", header.getvalue())
        archive.writestr("meta.npy", b"")
    with pytest.raises(EplbError, match="not a trace"):
        trace.read(path)


def packed(path: Path, counts: bytes, meta: bytes, names: tuple[str, str], compression: int) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in zip(names, (counts, meta), strict=True):
            archive.writestr(name, content)
    return path


def stored(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("counts", "meta", "names"),
    [
        (b"no header", stored(meta_of(META)), ("counts", "meta.npy")),
        (stored(COUNTS), b"{}", ("counts.npy", "meta")),
        (stored(COUNTS).replace(b"(12, 2, 8)", b"(True, 2,)"), stored(meta_of(META)), ("counts.npy", "meta.npy")),
    ],
)
def test_members_that_are_no_arrays_are_no_trace(
    tmp_path: Path, counts: bytes, meta: bytes, names: tuple[str, str]
) -> None:
    with pytest.raises(EplbError, match="not a trace"):
        trace.read(packed(tmp_path / "a.npz", counts, meta, names, zipfile.ZIP_STORED))


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_no_decompressor_takes_is_no_trace(tmp_path: Path, compression: int) -> None:
    names = "counts.npy", "meta.npy"
    path = packed(tmp_path / "a.npz", stored(COUNTS), stored(meta_of(META)), names, compression)
    whole = bytearray(path.read_bytes())
    assert (trace.read(path).counts == COUNTS).all()
    begins = whole.index(b"counts.npy") + len("counts.npy")
    whole[begins + 13 : begins + 63] = bytes(50)
    path.write_bytes(whole)
    with pytest.raises(EplbError, match="not a trace"):
        trace.read(path)


@given(st.data())
def test_damaged_files_are_traces_or_one_line(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.npz"
    trace.write(path, COUNTS, META)
    whole = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[at] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        assert trace.read(path).counts.ndim == 3
    except EplbError as error:
        assert "\n" not in str(error)


def test_counts_that_no_reader_takes_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(EplbError):
        trace.write(tmp_path / "a.npz", COUNTS - 100, META)
    assert list(tmp_path.iterdir()) == []


def test_no_device_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.symlink_to("/dev/null")
    with pytest.raises(OSError, match="no regular file"):
        trace.write(path, COUNTS, META)
    assert list(tmp_path.iterdir()) == [path] and not path.is_file()


def test_the_floor_is_one_where_replicas_are_drawn() -> None:
    """Loads that never change, from a placement that has seen as many: between what chance does and what it was."""
    random = np.random.default_rng(3)
    shares = random.dirichlet(np.full(32, 0.5))
    counts = random.multinomial(2000, shares, (400, 2)).astype(np.int32)
    together, layers = analyse(counts, ranks=8, physical=64)
    for row in (together, *layers):
        assert row.floor - 0.01 < row.placed < row.floor + 0.03 < row.static


def test_analyze_shows_every_layer_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write(tmp_path / "a.npz", COUNTS, META)
    assert run(["eplb", "analyze", str(tmp_path / "a.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "all"]
    assert "8 experts in 10 slots on 2 ranks" in lines[4]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert run(["eplb", "analyze", str(tmp_path / "a.npz"), "--ranks", "4", "--redundant", "1"]) == 0
    assert "8 experts in 12 slots on 4 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("meta", "steps", "arguments", "said"),
    [
        ({}, 12, [], "does not say how many ranks"),
        ({"ranks": "two"}, 12, [], "does not say how many ranks"),
        (META, 1, [], "no second half"),
        ({"ranks": 2, "physical": 4}, 12, [], "4 slots on 2 ranks"),
        (META, 12, ["--ranks", "2", "--nodes", "3"], "2 ranks on 3 nodes"),
        (META, 12, ["--plot", "/nowhere/a.png"], "/nowhere/a.png: No such file"),
        (META, 12, ["--redundant", "1000000000000"], "1,000,000,000,008 slots on 2 ranks"),
        ({"ranks": 10**12}, 12, [], "on 1,000,000,000,000 ranks"),
    ],
)
def test_analyze_ends_with_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    meta: dict[str, object],
    steps: int,
    arguments: list[str],
    said: str,
) -> None:
    trace.write(tmp_path / "a.npz", COUNTS[:steps], meta)
    assert run(["eplb", "analyze", str(tmp_path / "a.npz"), *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
