"""V4.1 and DSpark ask of a device what torch_npu registers for an NPU, by the list that `make ascend-ops` has taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from ascend.judge import judge, problems  # noqa: E402
from ascend.registrations import where  # noqa: E402
from ascend.stubs import make_stubs, symbols  # noqa: E402

from npu.inside import run_inside  # noqa: E402

RESULTS = json.loads((ROOT / "benchmarks/results/ascend_ops.json").read_text())


@pytest.mark.vllm
def test_every_operation_of_a_forward_pass_is_an_npus(tmp_path: Path) -> None:
    walked = json.loads(run_inside(tmp_path, "-m", "npu.walk").splitlines()[-1])
    assert problems(walked, RESULTS["registered"]) == []
    # The walk has seen the model: products, gathers, choices, writes; in every precision.
    assert {"aten::mm", "aten::bmm", "aten::topk", "aten::index_select", "aten::sort"} <= walked.keys()
    assert {"float32", "bfloat16", "int64"} <= {dtype for met in walked.values() for dtype in met["dtypes"]}


def test_the_record_is_without_problems() -> None:
    assert RESULTS["problems"] == [] and len(RESULTS["registered"]) > 500
    assert RESULTS["registered"]["aten::add.Tensor"] == "npu"


def test_what_a_plugin_registers_decides() -> None:
    registered = {"aten::a": "npu", "aten::b": "host", "aten::c.out": "npu"}
    assert judge("aten::a", ["aten::a"], registered) == "npu"
    assert judge("aten::b", ["aten::b"], registered) == "host"
    assert judge("aten::c", ["aten::c.out", "aten::a"], registered) == "composite"
    assert judge("aten::slice", [], registered) == "composite"
    assert judge("aten::d", ["aten::d"], registered) == "absent"
    assert judge("aten::e", ["aten::d", "aten::a"], registered) == "absent"
    assert judge("aten::f", ["aten::b"], registered) == "host"
    walked = {
        "aten::a": {"dtypes": ["float32", "float64"], "reaches": []},
        "aten::d": {"dtypes": ["int64"], "reaches": ["aten::d"]},
        "aten::slice": {"dtypes": ["complex64"], "reaches": []},
    }
    assert problems(walked, registered) == [
        "aten::a: computed with float64",
        "aten::d: absent",
        "aten::slice: computed with complex64",
    ]


def test_fallbacks_are_the_hosts() -> None:
    import torch

    name = "aten::frexp.Tensor"
    library = torch._C._dispatch_dump(name)
    assert where(library) == "host"  # nothing is registered for the device
    line = "PrivateUse1: registered at /src/{}.cpp:7 :: (Tensor self) -> Tensor [ boxed kernel ]"
    assert where(line.format("VariableFallbackKernel")) == "host" and where(line.format("RegisterNPU")) == "npu"


def test_stubs_have_what_is_missing_and_no_more(tmp_path: Path) -> None:
    """A library that needs another which is not there loads over its stub, whose functions return 0."""
    cc = ["cc", "-shared", "-fPIC"]
    gone = tmp_path / "gone"
    gone.mkdir()
    (gone / "gone.c").write_text("int far(void) { return 5; }\n")
    (tmp_path / "near.c").write_text("int far(void); int near(void) { return far() + 1; }\n")
    subprocess.run([*cc, "-o", gone / "libgone.so", gone / "gone.c"], check=True)
    near = tmp_path / "libnear.so"
    subprocess.run([*cc, "-o", near, tmp_path / "near.c", f"-L{gone}", "-lgone"], check=True)
    assert "far" in symbols(near, defined=False) and "near" in symbols(near, defined=True)
    assert make_stubs([near], [], tmp_path / "stubs") == {"libgone.so": 1}
    program = f"import ctypes; print(ctypes.CDLL({str(near)!r}).near())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"LD_LIBRARY_PATH": str(tmp_path / "stubs")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1\n"
