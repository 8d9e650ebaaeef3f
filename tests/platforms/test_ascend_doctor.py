"""The doctor's row about the Ascend platform, on made-up environments."""

from pathlib import Path

import pytest
from fake_ascend import CANN, DEVICE, install_ours, install_torch_npu, install_vllm_ascend, make_machine

from deepinfer_vllm.doctor.ascend import check_ascend
from deepinfer_vllm.doctor.check import Status
from deepinfer_vllm.platforms import detection
from fake_site import FakeSite

BREAKS = "; torch-npu without CANN breaks `import torch`"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file system of a machine with an NPU and CANN, and no variables set."""
    variables = ("DEEPINFER_VLLM_ASCEND", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
    for name in (*variables, "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    root = make_machine(tmp_path / "root", DEVICE, CANN)
    monkeypatch.setattr(detection, "ROOT", root)
    return root


def install(site: FakeSite, vllm_ascend: str = "0.32.0", torch_npu: str = "2.13.0", device: str = "A5") -> None:
    install_ours(site)
    site.install_vllm_cpu()
    install_vllm_ascend(site, vllm_ascend, device)
    install_torch_npu(site, torch_npu)


def test_active(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site)
    row = check_ascend(site.environment)
    assert row.status == Status.OK
    assert row.found == (
        "active in place of vllm-ascend's NPUPlatform (vllm-ascend 0.32.0, torch-npu 2.13.0, /dev/davinci0)"
    )
    monkeypatch.setenv("VLLM_PLUGINS", "deepinfer_vllm,deepinfer_ascend,ascend_model")
    row = check_ascend(site.environment)
    assert row.status == Status.OK and row.found.startswith("active by itself: VLLM_PLUGINS leaves vllm-ascend's")


@pytest.mark.parametrize(
    ("name", "value", "status", "found"),
    [
        ("DEEPINFER_VLLM_ASCEND", "off", "ok", "dormant (DEEPINFER_VLLM_ASCEND=off)"),
        ("DEEPINFER_VLLM_ASCEND", "on", "fail", "not known without DEEPINFER_VLLM_ASCEND"),
        ("VLLM_TARGET_DEVICE", "cpu", "warn", "dormant (VLLM_TARGET_DEVICE=cpu goes before every plugin)"),
        ("VLLM_PLUGINS", "ascend,deepinfer_vllm", "warn", "dormant (VLLM_PLUGINS leaves deepinfer_ascend out)"),
    ],
)
def test_variables(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, name: str, value: str, status: str, found: str
) -> None:
    install(site)
    monkeypatch.setenv(name, value)
    row = check_ascend(site.environment)
    assert (row.status, row.found) == (status, found)


@pytest.mark.parametrize(
    ("versions", "refusal"),
    [
        ({"vllm_ascend": "0.23.0.post1"}, "vllm-ascend 0.23.0.post1 (must be made for vLLM 0.32"),
        ({"torch_npu": "2.10.0.post4"}, "torch-npu 2.10.0.post4 (must be of the minor of torch 2.13.0+cpu"),
        ({"device": "A3"}, "vllm-ascend built for A3 (must be built for A5, the Ascend 950"),
        ({"device": ""}, "vllm-ascend built for an unknown NPU (must be"),
    ],
)
def test_a_stack_whose_parts_do_not_fit(site: FakeSite, versions: dict[str, str], refusal: str) -> None:
    install(site, **versions)
    row = check_ascend(site.environment)
    assert row.status == Status.WARN and "\n" not in row.found
    assert f", but DeepSeek-V4.1 will be refused: {refusal}" in row.found


def test_two_copies(site: FakeSite, tmp_path: Path) -> None:
    install(site)
    other = FakeSite(tmp_path / "other")
    install_vllm_ascend(other, "0.23.0")
    both = type(site.environment)(site.environment.python, (*site.environment.paths, other.path))
    row = check_ascend(both)
    assert row.status == Status.WARN and row.remedy == "uninstall vllm-ascend until one is left"
    assert row.found.endswith(", but 2 copies of vllm-ascend are installed and 0.32.0 is imported")


def test_half_of_a_stack(site: FakeSite, machine: Path) -> None:
    install_ours(site)
    install_torch_npu(site)
    row = check_ascend(site.environment)
    assert row.status == Status.WARN and row.remedy == "use vllm-ascend's container: docs/ascend.md"
    assert row.found == "dormant (not installed: vllm-ascend, though there is an NPU: /dev/davinci0)"
    install(FakeSite(site.path.parent / "whole"))
    (machine / "usr/lib/libhccl.so").unlink()
    whole = type(site.environment)(site.environment.python, (site.path.parent / "whole",))
    row = check_ascend(whole)
    assert row.found == f"dormant (the loader does not find CANN's libhccl.so, which torch-npu needs){BREAKS}"
    (machine / "dev/davinci0").unlink()
    row = check_ascend(whole)
    assert row.status == Status.WARN and row.found.startswith("dormant (no NPU: neither /dev/davinciN nor ")
    assert row.found.endswith(BREAKS) and row.remedy.startswith("uninstall torch-npu, or use vllm-ascend's container")


def test_torch_npu_alone(site: FakeSite, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_ours(site)
    install_torch_npu(site)
    for file in ("usr/lib/libhccl.so", "dev/davinci0"):
        (machine / file).unlink()
    row = check_ascend(site.environment)
    assert (row.status, row.found) == (Status.WARN, f"dormant (not installed: vllm-ascend){BREAKS}")
    make_machine(machine, "usr/local/Ascend/cann/set_env.sh")
    assert check_ascend(site.environment).remedy == "source /usr/local/Ascend/cann/set_env.sh"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch then leaves it alone
    assert check_ascend(site.environment).found == "dormant (not installed: vllm-ascend)"


def test_nobody_else_notices(site: FakeSite, machine: Path) -> None:
    (machine / "dev/davinci0").unlink()
    assert check_ascend(site.environment).status == Status.WARN  # without our own entry point
    install_ours(site)
    row = check_ascend(site.environment)
    assert (row.status, row.found) == (Status.OK, "dormant (not installed: vllm-ascend, torch-npu)")
