"""DeepSeek-V4.1-Flash and its serving layer for vLLM.

Importing this package loads neither vLLM nor torch. vLLM calls `register` in each of its processes through the
`vllm.general_plugins` entry point.
"""

__version__ = "0.1.0"


def register() -> None:
    """Register everything this plugin adds to vLLM. Re-entrant; called by vLLM once or more in every process."""
    from deepinfer_vllm import compat
    from deepinfer_vllm.kv_connector import register_connector
    from deepinfer_vllm.models import register_models

    register_models()
    register_connector()
    compat.provide_torch_kernels()
    compat.provide_dspark()
    compat.carry_worker_reports()
    compat.publish_reports()
    compat.fill_eplb_presets()
    compat.hook_eplb()
    compat.let_drafts_stay()
