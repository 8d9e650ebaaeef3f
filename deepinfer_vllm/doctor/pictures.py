"""Can `deepinfer sweep` draw?"""

from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.environment import Environment


def check_pictures(environment: Environment) -> Check:
    """matplotlib is an extra: without it there is only no picture."""
    found = environment.distribution("matplotlib")
    if found is None:
        return Check("pictures", Status.OK, 'none of sweeps (matplotlib is not installed: "deepinfer-vllm[plot]")')
    return Check("pictures", Status.OK, f"of sweeps, by matplotlib {found.version}")
