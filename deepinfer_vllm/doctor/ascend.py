"""The Ascend platform: is its entry point there, and why is it dormant?"""

from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.environment import Environment

GROUP = "vllm.platform_plugins"
TARGET = "deepinfer_vllm.platforms:ascend_platform"


def check_ascend(environment: Environment) -> Check:
    name = "Ascend platform"
    if TARGET not in [point.value for point in environment.entry_points(GROUP)]:
        return Check(name, Status.WARN, f"no entry point in {GROUP}", "reinstall deepinfer-vllm")
    missing = [package for package in ("vllm_ascend", "torch_npu") if environment.package_dir(package) is None]
    reason = f"not installed: {', '.join(missing)}" if missing else "this version has no Ascend platform yet"
    return Check(name, Status.OK, f"dormant ({reason})")
