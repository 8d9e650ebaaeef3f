"""Config hooks for an architecture of ours, where vLLM has a private dict for its own."""

import importlib
from typing import Any


def hook_model_config(architecture: str, module: str) -> None:
    """Let `module` check and adjust configs where vLLM checks its own architectures: errors come before any worker.

    `module` has verify_model(model_config) and verify_engine(vllm_config) and is imported when a config is there.
    vLLM's own hook for the architecture is called too.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    upstream = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
    if getattr(upstream, "deepinfer_hooked", False):
        return

    class HookedConfig(upstream):  # type: ignore[misc, valid-type]
        deepinfer_hooked = True

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            importlib.import_module(module).verify_model(model_config)
            upstream.verify_and_update_model_config(model_config)

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            upstream.verify_and_update_config(vllm_config)
            importlib.import_module(module).verify_engine(vllm_config)

    MODELS_CONFIG_MAP[architecture] = HookedConfig
