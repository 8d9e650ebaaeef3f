"""Who listens to what becomes of an engine's drafts: a record of them, and the check of their confidences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.drift import Drift
from deepinfer_vllm.spec_decode.made import made_for
from deepinfer_vllm.spec_decode.records import Recorder
from deepinfer_vllm.spec_decode.stats import DraftStats


class Listens(Protocol):
    """Wants to know what became of drafts."""

    def record(
        self,
        confidences: NDArray[np.floating],
        drafted: NDArray[np.integer],
        accepted: NDArray[np.integer],
        requests: list[str],
    ) -> None:
        """Raw confidences [R, S]; how many drafts were verified and how many of these stood [R]; ids [R]."""


def listeners(
    record_to: str, config: Any, calibration: Calibration | None, stats: DraftStats, warn: Callable[[str], None]
) -> list[Listens]:
    """For the first rank of an engine of vLLM's `config` whose draft model has a confidence head.

    record_to: a file, or empty for none; calibration: what the engine uses. The error goes to the gauge
    `calibration_error` of stats. Never raises for what a disk does.
    """
    positions = config.speculative_config.num_speculative_tokens
    drift = Drift(
        calibration or Calibration.identity(positions),
        tell=lambda error: stats.gauges.update(calibration_error=error),
    )
    found: list[Listens] = [drift]
    if record_to:
        try:
            found.append(Recorder(Path(record_to), made_for(config), warn))
        except OSError as error:
            warn(f"Drafts are not recorded in {record_to}: the checkpoint cannot be read ({error}).")
    return found
