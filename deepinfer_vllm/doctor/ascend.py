"""The Ascend platform: would vLLM make it its own here, why or why not, and would a DeepSeek-V4.1 start on it?"""

import os

from deepinfer_vllm import envs
from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.environment import Environment
from deepinfer_vllm.platforms.activation import GROUP, Activation, Route, decide, let_through, stock_loads
from deepinfer_vllm.platforms.conditions import unmet_by_installation
from deepinfer_vllm.platforms.detection import AscendStack, find_stack

NAME = "Ascend platform"
PLUGIN = "deepinfer_ascend"
TARGET = "deepinfer_vllm.platforms:ascend_platform"


def check_ascend(environment: Environment) -> Check:
    """Asks what vLLM asks, of metadata and files: a stack that cannot be imported is looked at all the same."""
    points = environment.entry_points(GROUP)
    if TARGET not in [point.value for point in points]:
        return Check(NAME, Status.WARN, f"no entry point in {GROUP}", "reinstall deepinfer-vllm")
    try:
        mode = envs.DEEPINFER_VLLM_ASCEND
    except ValueError:
        return Check(NAME, Status.FAIL, "not known without DEEPINFER_VLLM_ASCEND", "see the row of our variables")
    paths = None if environment == Environment.current() else [str(path) for path in environment.paths]
    stack = find_stack(paths)
    activation = _past_the_plugin(decide(mode, stack, stock_loads(points)))
    if activation.route is Route.DORMANT:
        return _check_dormant(activation, stack)
    return _check_active(activation, stack)


def _past_the_plugin(activation: Activation) -> Activation:
    """What keeps vLLM from asking the plugin at all."""
    if activation.route is Route.DORMANT:
        return activation
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        why = "VLLM_TARGET_DEVICE=cpu goes before every plugin"
        return Activation(Route.DORMANT, why, "unset VLLM_TARGET_DEVICE", notable=True)
    if not let_through(PLUGIN):
        return Activation(Route.DORMANT, f"VLLM_PLUGINS leaves {PLUGIN} out", f"add {PLUGIN} to it", notable=True)
    return activation


def _check_dormant(activation: Activation, stack: AscendStack) -> Check:
    found = f"dormant ({activation.why})"
    if stack.torch_npu and not stack.cann and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        uninstall = "uninstall torch-npu, or use vllm-ascend's container: docs/ascend.md"
        remedy = f"source {stack.cann_setup}" if stack.cann_setup else uninstall
        return Check(NAME, Status.WARN, f"{found}; torch-npu without CANN breaks `import torch`", remedy)
    return Check(NAME, Status.WARN if activation.notable else Status.OK, found, activation.remedy)


def _check_active(activation: Activation, stack: AscendStack) -> Check:
    found = f"active {activation.route.value} ({activation.why})"
    for name, copies in (("vllm-ascend", stack.vllm_ascend), ("torch-npu", stack.torch_npu)):
        if len(copies) > 1:
            why = f"{len(copies)} copies of {name} are installed and {copies[0]} is imported"
            return Check(NAME, Status.WARN, f"{found}, but {why}", f"uninstall {name} until one is left")
    if problems := unmet_by_installation(stack):
        refused = f"{found}, but DeepSeek-V4.1 will be refused: {', '.join(problems)}"
        return Check(NAME, Status.WARN, refused, "use versions made for each other: docs/ascend.md")
    return Check(NAME, Status.OK, found)
