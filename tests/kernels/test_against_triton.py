"""Every function of torch_kernels leaves its arguments as vLLM's own kernel leaves them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_vllm.torch_kernels.registry import KERNELS
from kernels.launch import SEEDS, Case, Random, all_cases

CASES = list(all_cases())
Results = dict[tuple[str, int], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def kernel_results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    """What the kernels did, by case and seed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton's interpreter; xgrammar, which vLLM requires, brings Triton on Linux x86-64")
    file = tmp_path_factory.mktemp("oracle") / "results.pt"
    tests = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "kernels.oracle", str(file)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    results: Results = torch.load(file)
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("seed", SEEDS)
def test_as_the_kernel(case: Case, seed: int, kernel_results: Results) -> None:
    found, wanted = case.make(Random(seed)).run(case.override()), kernel_results[case.id, seed]
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        tolerance = case.tolerance if tensor.is_floating_point() else 0
        torch.testing.assert_close(
            tensor,
            wanted[name],
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def test_every_kernel_has_a_case() -> None:
    assert {case.name for case in CASES} == KERNELS.keys()


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="Triton has wheels there")
def test_triton_is_there_where_it_can_be() -> None:
    assert importlib.util.find_spec("triton") is not None
