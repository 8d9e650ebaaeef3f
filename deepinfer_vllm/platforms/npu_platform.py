"""vllm-ascend's platform, and what DeepSeek-V4.1 needs of it. Imported only where vLLM has asked for the platform."""

import logging
from typing import Any

import vllm_ascend.platform
from vllm_ascend.platform import NPUPlatform

from deepinfer_vllm.models import PORTABLE_CLASSES
from deepinfer_vllm.platforms.activation import Route
from deepinfer_vllm.platforms.conditions import unmet, unmet_by_installation
from deepinfer_vllm.platforms.defaults import fill_unset
from deepinfer_vllm.platforms.detection import find_stack
from deepinfer_vllm.platforms.engine_facts import (
    Implementation,
    collect,
    implementation,
    is_v41,
    registered_module,
)
from deepinfer_vllm.platforms.tilelang import register

logger = logging.getLogger("vllm.deepinfer")


class DeepInferAscendPlatform(NPUPlatform):
    """Engines of other models pass through as they are."""

    @classmethod
    def log_warnings(cls) -> None:
        """vLLM's hook, once its log is set up: what the platform is, and by which route it came."""
        super().log_warnings()
        route = Route.GRAFT if vllm_ascend.platform.NPUPlatform is cls else Route.CLASS_PATH
        logger.info(
            "The Ascend platform is active %s. It checks DeepSeek-V4.1; other models run as on vllm-ascend's. "
            "DEEPINFER_VLLM_ASCEND=off turns it off",
            route.value,
        )

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """vllm-ascend's changes to vLLM. Raises RuntimeError, in one line, where they are for another vLLM."""
        try:
            super().pre_register_and_update(parser)
        except (ImportError, AttributeError) as error:
            reasons = unmet_by_installation(find_stack()) or ["it changes a vLLM that is not this one"]
            message = f"vllm-ascend cannot be used here: {', '.join(reasons)}. It says: {error}"
            raise RuntimeError(message) from None

    @classmethod
    def verify_model_arch(cls, model_arch: str) -> None:
        """Refuse V4.1 classes that are for another device. Raises ValueError."""
        module = registered_module(model_arch)
        if model_arch in PORTABLE_CLASSES and implementation(module) is Implementation.OTHER:
            remedy = "unset DEEPINFER_VLLM_MODEL for the portable one"
            raise ValueError(f"{model_arch} is {module}'s, which does not run on an NPU: {remedy}")
        super().verify_model_arch(model_arch)

    @classmethod
    def v41_problems(cls, vllm_config: Any) -> list[str]:
        """One phrase for each condition that a V4.1 engine does not meet here; none for other models."""
        return unmet(collect(vllm_config)) if is_v41(vllm_config) else []

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """vLLM's hook, before it fills in its own defaults."""
        if is_v41(vllm_config):
            fill_unset(vllm_config, collect(vllm_config).implementation)
        super().apply_config_platform_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's hook, before vllm-ascend changes the configuration. Raises ValueError with all that is unmet."""
        if problems := cls.v41_problems(vllm_config):
            found = ", ".join(problems)
            raise ValueError(f"DeepSeek-V4.1 cannot run on this Ascend platform with {found}. Change these")
        super().check_and_update_config(vllm_config)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM's hook for kernels in place of Triton's: after vllm-ascend's, ours in TileLang, where CANN is."""
        from vllm.triton_utils.dispatcher import register_kernels

        super().register_triton_kernel_overrides()
        register(register_kernels)
