"""One line in vLLM's log that says what was built: for bug reports, and for `make demo` to repeat."""

import logging
from typing import Any

import deepinfer_vllm
from deepinfer_vllm.native import invariance

MARK = "deepinfer-vllm serves with"
"""How the line begins, after vLLM's own prefix."""

logger = logging.getLogger("vllm.deepinfer")  # vLLM shows its own loggers only


def announce(model: object, vllm_config: Any, decoder_replay: bool) -> None:
    """Log the class that was really built, this plugin's version, the platform, the runner and decoder-side replay."""
    from vllm.platforms import current_platform

    logger.info(
        "%s %s.%s (plugin %s), platform %s, model runner %s, decoder replay %s%s",
        MARK,
        type(model).__module__,
        type(model).__qualname__,
        deepinfer_vllm.__version__,
        current_platform.device_type,
        "V2" if vllm_config.use_v2_model_runner else "V1",
        "on" if decoder_replay else "off",
        f", {invariance.way().value}" if invariance.decided() else "",
    )
