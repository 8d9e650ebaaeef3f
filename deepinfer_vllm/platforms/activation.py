"""Whether the Ascend platform is active in this environment, by which route, and why: for vLLM and for the doctor.

vLLM asks every platform plugin before it imports any platform, and refuses two that answer. vllm-ascend's answers
always. So ours takes its place only where it is left out, and elsewhere swaps a subclass in as it is imported.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint, entry_points

from deepinfer_vllm.platforms.detection import AscendStack

GROUP = "vllm.platform_plugins"


class Route(Enum):
    """How the platform becomes vLLM's."""

    DORMANT = "dormant"
    GRAFT = "in place of vllm-ascend's NPUPlatform"
    CLASS_PATH = "by itself: VLLM_PLUGINS leaves vllm-ascend's own platform out"


@dataclass(frozen=True)
class Activation:
    """`why` and `remedy` are sentences without a full stop. `notable`: somebody seems to have meant it otherwise."""

    route: Route
    why: str
    remedy: str = ""
    notable: bool = False


def decide(mode: str, stack: AscendStack, stock_loads: bool) -> Activation:
    """`mode` is DEEPINFER_VLLM_ASCEND; `stock_loads`: whether vLLM loads vllm-ascend's own platform plugin."""
    if mode == "off":
        return Activation(Route.DORMANT, "DEEPINFER_VLLM_ASCEND=off")
    packages = {"vllm-ascend": stack.vllm_ascend, "torch-npu": stack.torch_npu}
    missing = [name for name, versions in packages.items() if not versions]
    here = ", ".join(stack.nodes)
    if missing:
        why = f"not installed: {', '.join(missing)}" + (f", though there is an NPU: {here}" if here else "")
        meant = bool(here) or len(missing) == 1 or mode == "force"
        remedy = "use vllm-ascend's container: docs/ascend.md" if meant else ""
        return Activation(Route.DORMANT, why, remedy, notable=meant)
    if mode != "force":
        if not stack.nodes:
            return _no_device(stack)
        if not stack.cann:
            return _no_cann(stack)
    route = Route.GRAFT if stock_loads else Route.CLASS_PATH
    versions = [f"{name} {copies[0]}" for name, copies in packages.items()]
    return Activation(route, ", ".join([*versions, here or "no NPU, but DEEPINFER_VLLM_ASCEND=force"]))


def _no_device(stack: AscendStack) -> Activation:
    if stack.driver:
        why = "the driver is here, but no NPU: there is /dev/davinci_manager and no /dev/davinciN"
        return Activation(Route.DORMANT, why, "hand the devices to the container: --device /dev/davinci0", True)
    why = "no NPU: neither /dev/davinciN nor /sys/class/ubcore/udma*/device/ub_totalues above 0"
    return Activation(Route.DORMANT, why, "install the driver, or use a machine that has NPUs", True)


def _no_cann(stack: AscendStack) -> Activation:
    why = "the loader does not find CANN's libhccl.so, which torch-npu needs"
    remedy = f"source {stack.cann_setup}" if stack.cann_setup else "install CANN, or use vllm-ascend's container"
    return Activation(Route.DORMANT, why, remedy, True)


def let_through(plugin: str) -> bool:
    """Whether VLLM_PLUGINS lets vLLM load the plugin of this name: unset it does, else names must be equal."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is None or plugin in allowed.split(",")


def stock_loads(points: Iterable[EntryPoint] | None = None) -> bool:
    """Whether vLLM loads vllm-ascend's platform plugin. `points`: the group's (None: those of this process)."""
    points = entry_points(group=GROUP) if points is None else points
    return any(point.module.partition(".")[0] == "vllm_ascend" and let_through(point.name) for point in points)
