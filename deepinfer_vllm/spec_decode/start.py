"""DSpark's decisions, put together as a worker's runner gets its caches."""

from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

from deepinfer_vllm import envs
from deepinfer_vllm.spec_decode import calibration_file
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.controller import Controller
from deepinfer_vllm.spec_decode.settings import Settings, trimming_problems
from deepinfer_vllm.spec_decode.start_costs import start_costs
from deepinfer_vllm.spec_decode.stats import DraftStats
from deepinfer_vllm.spec_decode.step_times import StepTimes
from deepinfer_vllm.spec_decode.verifier import HostVerifier

logger = init_logger("vllm." + __name__)


def start(runner: Any, extra: tuple[None, ...]) -> HostVerifier | None:
    """What decides about the drafts of a runner whose speculator is ours; None where all are verified.

    `extra`: see `HostVerifier`. Every tensor-parallel rank must call it.
    """
    speculator, config = runner.speculator, runner.vllm_config
    settings = Settings.read(current=True)
    speculator.stats = DraftStats(speculator.num_speculative_steps)
    if settings.form == "fixed":
        return None
    if problems := trimming_problems(config):
        logger.warning(
            "DSpark verifies every draft, whether it pays or not: a budget of drafts does not go with %s. "
            "DEEPINFER_VLLM_DSPARK_BUDGET=fixed says that this is meant.",
            " and ".join(problems),
        )
        return None
    ranks = get_tp_group()
    try:
        costs = start_costs(runner, ranks)
    except Exception as error:  # whatever a model does in a dummy step that vLLM itself does not run on a CPU
        logger.warning(
            "DSpark verifies every draft, whether it pays or not: what steps cost could not be measured, as a dummy "
            "step failed with %s: %s. DEEPINFER_VLLM_DSPARK_BUDGET=fixed says that this is meant.",
            type(error).__name__,
            error,
        )
        return None
    calibration = None
    if speculator.use_confidence_head:
        calibration = load_calibration(settings.calibration, config)
    else:
        logger.warning(
            "The draft model has no confidence head: DSpark's budget goes by how often drafts of a position are "
            "accepted, and cannot tell likely drafts from unlikely ones."
        )
    controller = Controller(calibration, costs, settings)
    verifier = HostVerifier(
        controller,
        StepTimes(controller, ranks),
        speculator,
        runner.req_states,
        runner.input_buffers.query_start_loc,
        runner.model_state.num_new_sampled_tokens_per_step,
        sort_batch_req_ids,
        extra,
    )
    verifier.stats = speculator.stats
    speculator.stats.gauges["calibrated"] = float(calibration is not None and not calibration.is_identity)
    return verifier


def load_calibration(setting: str, config: Any) -> Calibration | None:
    """What DEEPINFER_VLLM_DSPARK_CALIBRATION asks for: None without a file. At most one warning, never an error."""
    directory = Path(config.model_config.model)
    path = directory / calibration_file.NAME if setting == "auto" else Path(setting)
    if setting == "off" or (setting == "auto" and not path.is_file()):
        return None
    try:
        digest = calibration_file.checkpoint_digest(directory)
    except OSError as error:
        logger.warning("%s cannot be held against the checkpoint: %s. Confidences are used as they are.", path, error)
        return None
    made = calibration_file.Made(
        digest,
        config.speculative_config.num_speculative_tokens,
        str(config.model_config.dtype).removeprefix("torch."),
        envs.DEEPINFER_VLLM_NUMERICS,
    )
    return calibration_file.load(path, made, logger.warning)
