"""The calibration that an engine uses."""

from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from deepinfer_vllm.models.deepseek_v41.weights import checkpoint_directory
from deepinfer_vllm.spec_decode import calibration_file
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.made import made_for

logger = init_logger("vllm." + __name__)


def load_calibration(setting: str, config: Any) -> Calibration | None:
    """What DEEPINFER_VLLM_DSPARK_CALIBRATION asks for: None without a file. At most one warning, never an error."""
    if setting == "off":
        return None
    path = Path(setting)
    try:
        if setting == "auto":
            model = config.model_config
            path = checkpoint_directory(model.model, model.revision) / calibration_file.NAME
            if not path.is_file():
                return None
        made = made_for(config)
    except OSError as error:
        logger.warning("No calibration is used, as the checkpoint's files cannot be read: %s", error)
        return None
    return calibration_file.load(path, made, logger.warning)
