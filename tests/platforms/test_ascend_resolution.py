"""Which platform vLLM's own resolver activates, beside a made-up vllm-ascend: the table of docs/ascend.md."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_ascend import CANN, DEVICE, THEIRS, install_ours, install_torch_npu, install_vllm_ascend, make_machine

from fake_site import FakeSite

pytestmark = pytest.mark.vllm

OURS = "deepinfer_vllm.platforms.npu_platform.DeepInferAscendPlatform"
STOCK = "vllm_ascend.platform.NPUPlatform"
BUILT_IN = "built-in"
GRAFTED = "INFO The Ascend platform is active in place of vllm-ascend's NPUPlatform. "
MISFIT = "WARNING vllm-ascend will hardly start here: vllm-ascend "
WITHOUT_THEIRS = "deepinfer_ascend,deepinfer_vllm,ascend_model"
VLLM_033 = os.environ.get("VLLM_033", "")


@dataclass(frozen=True)
class Case:
    """What is installed, in the order of the path; what the machine has; what is expected."""

    expected: str
    says: str = ""
    sites: tuple[str, ...] = ("ours", "vllm-ascend", "torch-npu")
    machine: str = "npu"
    environ: dict[str, str] = field(default_factory=dict)


CASES = {
    "nothing of Ascend": Case(BUILT_IN, sites=("ours",), machine="bare"),
    "an NPU alone": Case(BUILT_IN, "WARNING The Ascend platform is dormant: not installed", sites=("ours",)),
    "grafted": Case(OURS, GRAFTED),
    "grafted, theirs first": Case(OURS, GRAFTED, sites=("torch-npu", "vllm-ascend", "ours")),
    "no NPU": Case(STOCK, "WARNING The Ascend platform is dormant: no NPU", machine="bare"),
    "no CANN": Case(STOCK, "WARNING The Ascend platform is dormant: the loader does not find", machine="no CANN"),
    "no torch-npu": Case(
        STOCK, "WARNING The Ascend platform is dormant: not installed: torch-npu", ("ours", "vllm-ascend")
    ),
    "class path": Case(OURS, "INFO The Ascend platform is active by itself", environ={"VLLM_PLUGINS": WITHOUT_THEIRS}),
    "class path, theirs first": Case(
        OURS,
        "INFO The Ascend platform is active by itself",
        sites=("vllm-ascend", "torch-npu", "ours"),
        environ={"VLLM_PLUGINS": WITHOUT_THEIRS},
    ),
    "no CANN, theirs left out": Case(
        BUILT_IN,
        "WARNING The Ascend platform is dormant: the loader",
        machine="no CANN",
        environ={"VLLM_PLUGINS": WITHOUT_THEIRS},
    ),
    "ours left out": Case(STOCK, environ={"VLLM_PLUGINS": "ascend,deepinfer_vllm"}),
    "off": Case(STOCK, environ={"DEEPINFER_VLLM_ASCEND": "off"}),
    "off, theirs left out": Case(BUILT_IN, environ={"DEEPINFER_VLLM_ASCEND": "off", "VLLM_PLUGINS": WITHOUT_THEIRS}),
    "forced": Case(OURS, GRAFTED, machine="bare", environ={"DEEPINFER_VLLM_ASCEND": "force"}),
    "forced, class path": Case(
        OURS,
        "INFO The Ascend platform is active by itself",
        machine="bare",
        environ={"DEEPINFER_VLLM_ASCEND": "force", "VLLM_PLUGINS": WITHOUT_THEIRS},
    ),
    "forced without vllm-ascend": Case(
        BUILT_IN,
        "WARNING The Ascend platform is dormant: not installed: vllm-ascend",
        ("ours", "torch-npu"),
        environ={"DEEPINFER_VLLM_ASCEND": "force"},
    ),
    "a value that is not allowed": Case(
        STOCK,
        "WARNING The Ascend platform is dormant: DEEPINFER_VLLM_ASCEND='on': the value must be auto or off or force",
        environ={"DEEPINFER_VLLM_ASCEND": "on"},
    ),
    "the target is a CPU": Case("vllm.platforms.cpu.CpuPlatform", environ={"VLLM_TARGET_DEVICE": "cpu"}),
    "vllm-ascend without metadata": Case(
        BUILT_IN,
        "WARNING The Ascend platform is dormant: not installed: vllm-ascend, though there is an NPU",
        ("ours", "checkout", "torch-npu"),
    ),
    "vllm-ascend cannot be imported": Case(BUILT_IN, sites=("ours", "broken", "torch-npu")),
    "made for another vLLM": Case(OURS, GRAFTED, sites=("ours", "old", "torch-npu")),
    "a third platform, active too": Case(
        "error: ['ascend', 'other']", sites=("ours", "vllm-ascend", "torch-npu", "other")
    ),
    # The rule that all of this is for.
    "a plugin that always answers": Case(
        "error: ['always', 'ascend']", sites=("ours", "vllm-ascend", "torch-npu", "always")
    ),
}


def make_sites(directory: Path) -> dict[str, str]:
    """Each part of a stack in a site of its own: its path by its name."""
    made = {
        name: FakeSite(directory / name) for name in ("ours", "vllm-ascend", "torch-npu", "checkout", "broken", "old")
    }
    made |= {name: FakeSite(directory / name) for name in ("other", "always")}
    install_ours(made["ours"])
    install_vllm_ascend(made["vllm-ascend"])
    install_torch_npu(made["torch-npu"])
    install_vllm_ascend(made["old"], "0.23.0.post1")
    shutil.rmtree(install_vllm_ascend(made["checkout"]))
    install_vllm_ascend(made["broken"])
    (made["broken"].path / "vllm_ascend/__init__.py").write_text("import no_such_module\n")
    for name in ("other", "always"):
        made[name].install(name, "1.0", points=THEIRS.replace("ascend =", f"{name} ="))
    return {name: str(site.path) for name, site in made.items()}


def resolve(tree: str, directory: Path) -> dict[str, Any]:
    """What vLLM of `tree` ("": the installed one) makes of every case."""
    sites = make_sites(directory / "sites")
    machines = {
        "npu": make_machine(directory / "npu", DEVICE, CANN),
        "bare": make_machine(directory / "bare"),
        "no CANN": make_machine(directory / "no-cann", DEVICE),
    }
    requests = [
        {
            "paths": [sites[name] for name in case.sites],
            "environ": case.environ,
            "root": str(machines[case.machine]),
        }
        for case in CASES.values()
    ]
    removed = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "LD_LIBRARY_PATH", "DEEPINFER_VLLM_ASCEND")
    environ = {name: value for name, value in os.environ.items() if name not in removed}
    child = Path(__file__).with_name("resolve_platform.py")
    done = subprocess.run(
        [sys.executable, child, *([tree] if tree else [])],
        input=json.dumps(requests),
        env=environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return resolve("", tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not VLLM_033:
        pytest.skip("VLLM_033 names no directory with the package vllm 0.33, of which there is no build for CPUs")
    return resolve(VLLM_033, tmp_path_factory.mktemp("newest"))


def check(name: str, answer: dict[str, Any], fits: Callable[[Case], bool], *built_in: str) -> None:
    case = CASES[name]
    if case.expected.startswith("error: "):
        assert answer["error"].startswith("Only one platform plugin can be activated")
        assert all(plugin in answer["error"] for plugin in json.loads(case.expected[7:].replace("'", '"')))
        assert "deepinfer" not in answer["error"]
        return
    assert "error" not in answer, answer["error"]
    assert answer["platform"][0] in (built_in if case.expected == BUILT_IN else (case.expected,))
    assert (STOCK in answer["platform"]) == (case.expected in (STOCK, OURS))
    assert answer["idempotent"] and answer["loaded"] == []
    log = [line for line in answer["log"] if not line.startswith(MISFIT)]
    assert len(log) == bool(case.says) and all(line.startswith(case.says) for line in log)
    misfits = len(answer["log"]) - len(log)
    assert misfits == (not fits(case)) if case.expected == OURS else misfits <= (not fits(case))


@pytest.mark.parametrize("name", CASES)
def test_installed_vllm(name: str, installed: dict[str, Any]) -> None:
    check(name, installed[name], lambda case: "old" not in case.sites, "vllm.platforms.cpu.CpuPlatform")


@pytest.mark.parametrize("name", CASES)
def test_vllm_033(name: str, newest: dict[str, Any]) -> None:
    built_in = ("vllm.platforms.interface.UnspecifiedPlatform", "vllm.platforms.cpu.CpuPlatform")
    check(name, newest[name], lambda case: False, *built_in)
    assert "platform" not in newest[name] or newest[name]["vllm"].startswith(VLLM_033)


def test_the_hook_loads_neither_vllm_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from deepinfer_vllm.platforms import ascend_platform; print(ascend_platform(),"
        " *sorted({'vllm', 'torch', 'transformers', 'numpy'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "DEEPINFER_VLLM_ASCEND"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environ
    )
    assert done.stdout.split() == ["None"] and done.stderr == ""
