"""A JSON file that is there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from deepinfer_vllm.evaluation.errors import EvaluationError


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Put `value` at `path`, in place of what is there. Raises EvaluationError where the disk refuses it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise EvaluationError(f"{path}: {error.strerror}; the same command continues") from None
