"""FlashMLA, DeepGEMM, DeepSelect, DeepEP: which copy of each would vLLM use here?

vLLM carries its own builds of the first three. A separately installed `deep_gemm` goes before vLLM's own.
"""

from dataclasses import dataclass
from pathlib import Path

from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.environment import Environment


@dataclass(frozen=True)
class Library:
    """`vendored`: glob below the package vllm. `shadows`: vLLM prefers the external package to its own copy."""

    name: str
    external: str
    vendored: str | None
    shadows: bool = False


LIBRARIES = (
    Library("FlashMLA", external="flash_mla", vendored="_flashmla_C*.so"),
    Library("DeepGEMM", external="deep_gemm", vendored="third_party/deep_gemm/__init__.py", shadows=True),
    Library("DeepSelect", external="deep_select", vendored="_deepselect_C*.so"),
    Library("DeepEP", external="deep_ep", vendored=None),
)


def check_libraries(environment: Environment, platform_kind: str) -> list[Check]:
    """One row each. `platform_kind` is vLLM's device type: only `cuda` and `rocm` use these libraries."""
    vllm = environment.package_dir("vllm")
    return [_check(library, environment, vllm, platform_kind in ("cuda", "rocm")) for library in LIBRARIES]


def _check(library: Library, environment: Environment, vllm: Path | None, used: bool) -> Check:
    vendored = bool(vllm and library.vendored and any(vllm.glob(library.vendored)))
    external = environment.package_dir(library.external)
    if external and library.shadows:
        return Check(
            library.name,
            Status.WARN,
            f"shadowing: {external} goes before vLLM's own" if vendored else f"external: {external}, vLLM has none",
            f"python -m pip uninstall {library.external}, unless you built it for this vLLM",
        )
    if vendored:
        return Check(library.name, Status.OK, "vendored by vLLM" + (f"; {external} is not used" if external else ""))
    if external:
        return Check(library.name, Status.OK, f"external: {external}")
    if library.vendored is None:
        return Check(library.name, Status.OK, "absent: vLLM does not vendor it, only its all-to-all back ends use it")
    if used:
        return Check(library.name, Status.WARN, "absent from this build of vLLM", "install the vllm wheel for this GPU")
    return Check(library.name, Status.OK, "absent: not used on this platform")
