"""vllm-ascend's real platform on the installed vLLM, with a stand-in for torch-npu: what `make ascend` installs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

OURS = "deepinfer_vllm.platforms.npu_platform.DeepInferAscendPlatform"
STOCK = "vllm_ascend.platform.NPUPlatform"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = Path(__file__).resolve().parents[2]
    site = root / "build/ascend/site"
    if not (site / "vllm_ascend").is_dir():
        pytest.skip("no vllm-ascend in build/ascend/site: `make ascend` installs it there; .ci/run does")
    out = tmp_path_factory.mktemp("answers") / "cases.json"
    removed = ("DEEPINFER_", "VLLM_PLUGINS", "VLLM_USE_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    command = [sys.executable, "benchmarks/ascend_platform.py", str(site), "--out", str(out)]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())["cases"]
    assert all("died" not in case for case in found), found
    return found


def only(cases: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (case,) = [case for case in cases if all(case[name] == value for name, value in wanted.items())]
    return case


@pytest.mark.parametrize("model", ["llama", "v41"])
def test_a_release_for_another_vllm_stops_in_its_own_changes(cases: list[dict[str, Any]], model: str) -> None:
    case = only(cases, platform="ours", versions="real", model=model)
    assert case["class"] == OURS
    assert case["error"] == "ModuleNotFoundError: No module named 'vllm.entrypoints.openai.engine'"
    assert case["raised_in"].startswith("platform/patch_")


def test_its_changes_fail_whatever_versions_are_claimed(cases: list[dict[str, Any]]) -> None:
    for name, expected in (("stock", STOCK), ("ours", OURS)):
        case = only(cases, platform=name, versions="fitting", model="llama")
        assert case["class"] == expected
        assert "No module named 'vllm.entrypoints.openai.engine'" in case["error"]
