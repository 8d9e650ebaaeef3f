"""Out-of-tree platforms. vLLM calls these detectors early and in every process, so they import nothing heavy."""

import functools
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_vllm.platforms.detection import AscendStack

CLASS_PATH = "deepinfer_vllm.platforms.npu_platform.DeepInferAscendPlatform"

logger = logging.getLogger("vllm.deepinfer")


def ascend_platform() -> str | None:
    """vLLM's `vllm.platform_plugins` hook: the platform class to use, or None for "not this platform".

    None too where our platform comes in place of vllm-ascend's, which vLLM then activates. Idempotent; never raises.
    """
    from deepinfer_vllm import envs
    from deepinfer_vllm.platforms.activation import Route, decide, stock_loads
    from deepinfer_vllm.platforms.detection import find_stack

    try:
        mode = envs.DEEPINFER_VLLM_ASCEND
    except ValueError as error:
        _say(logging.WARNING, f"The Ascend platform is dormant: {error}")
        return None
    stack = find_stack()
    activation = decide(mode, stack, stock_loads())
    if activation.route is Route.DORMANT:
        remedy = f"; {activation.remedy}" if activation.remedy else ""
        _say(
            logging.WARNING if activation.notable else logging.DEBUG,
            f"The Ascend platform is dormant: {activation.why}{remedy}",
        )
        return None
    _warn_of_versions(stack)
    if activation.route is Route.GRAFT:
        from deepinfer_vllm.platforms.graft import graft_when_imported

        graft_when_imported()
        return None
    return CLASS_PATH


def v41_problems(vllm_config: Any) -> list[str]:
    """What keeps a V4.1 engine from vLLM's active platform, one phrase each, if that platform is ours."""
    from vllm.platforms import current_platform

    ask = getattr(type(current_platform), "v41_problems", None)  # asked of the object, a missing name is logged
    return ask(vllm_config) if ask else []


def _warn_of_versions(stack: "AscendStack") -> None:
    """vllm-ascend made for another vLLM fails in its own plugins, before anything of ours is asked again."""
    from deepinfer_vllm.platforms.conditions import VERSIONS, unmet_by_installation

    if misfits := unmet_by_installation(stack, VERSIONS):
        _say(logging.WARNING, f"vllm-ascend will hardly start here: {', '.join(misfits)}")


@functools.cache  # vLLM asks twice
def _say(level: int, sentence: str) -> None:
    logger.log(level, "%s", sentence)
