"""A connector's say in the engine's configuration, before weights are loaded."""

import functools
import importlib
from typing import Any


def hook_connector_config(connector: str, module: str) -> None:
    """Let `module.settle(vllm_config)` check and adjust a configuration that names `connector`, alone or among others.

    vLLM makes connectors once the model is loaded, and asks none of them before.
    """
    from vllm.config import VllmConfig

    resolve = VllmConfig._post_init_kv_transfer_config
    if hasattr(resolve, "deepinfer_hooked"):
        return

    @functools.wraps(resolve)
    def resolve_and_settle(self: Any) -> None:
        resolve(self)
        if self.kv_transfer_config is not None and self.kv_transfer_config.has_connector(connector):
            importlib.import_module(module).settle(self)

    resolve_and_settle.deepinfer_hooked = True  # type: ignore[attr-defined]
    VllmConfig._post_init_kv_transfer_config = resolve_and_settle
