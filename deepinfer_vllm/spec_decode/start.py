"""DSpark's decisions, put together as a worker's runner gets its caches."""

from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

from deepinfer_vllm.spec_decode.arrivals import queue_of
from deepinfer_vllm.spec_decode.chosen_calibration import load_calibration
from deepinfer_vllm.spec_decode.controller import Controller
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.delayed_verifier import DelayedVerifier
from deepinfer_vllm.spec_decode.device_times import DeviceTimes
from deepinfer_vllm.spec_decode.listeners import listeners
from deepinfer_vllm.spec_decode.settings import Settings, trimming_problems
from deepinfer_vllm.spec_decode.shared_times import SharedTimes
from deepinfer_vllm.spec_decode.start_costs import DEVICE, HOST, start_costs
from deepinfer_vllm.spec_decode.stats import DraftStats
from deepinfer_vllm.spec_decode.step_times import StepTimes
from deepinfer_vllm.spec_decode.verifier import HostVerifier
from deepinfer_vllm.spec_decode.watcher import Watcher

logger = init_logger("vllm." + __name__)

EVERY_DRAFT = "DSpark verifies every draft, whether it pays or not"
MEANT = "DEEPINFER_VLLM_DSPARK_BUDGET=fixed says that this is meant"


def start(runner: Any, extra: tuple[None, ...]) -> HostVerifier | DelayedVerifier | None:
    """Give a runner and its speculator, which is ours, what decides about drafts: None where all are verified.

    `extra`: see `Trimming`. Every tensor-parallel rank must call it, once dummy steps take what live ones do.
    """
    speculator, config, ranks = runner.speculator, runner.vllm_config, get_tp_group()
    warn_of_another_block(speculator)
    settings = Settings.read(current=on_host(runner))
    speculator.stats = stats = DraftStats(speculator.num_speculative_steps)
    calibration = load_calibration(settings.calibration, config) if speculator.use_confidence_head else None
    stats.gauges["calibrated"] = float(calibration is not None and not calibration.is_identity)
    told = []
    if speculator.use_confidence_head and ranks.rank_in_group == 0:
        told = listeners(settings.record, config, calibration, stats, logger.warning)
    bonus_tokens = runner.model_state.num_new_sampled_tokens_per_step
    costs = None if settings.form == "fixed" else affordable_costs(runner, ranks)
    if costs is None:
        speculator.decider = Watcher(
            speculator, bonus_tokens, queue_of(runner.device, runner.max_num_reqs), told, stats
        )
        return None
    if not speculator.use_confidence_head:
        logger.warning(
            "The draft model has no confidence head: DSpark's budget goes by how often drafts of a position are "
            "accepted, and cannot tell likely drafts from unlikely ones."
        )
    controller = Controller(calibration, costs, settings)
    times = SharedTimes(controller, ranks)
    theirs = runner.req_states, runner.input_buffers.query_start_loc, bonus_tokens, sort_batch_req_ids, extra
    verifier: HostVerifier | DelayedVerifier
    if settings.form == "early-stop":
        verifier = HostVerifier(controller, StepTimes(times), speculator, *theirs)
    else:
        alike, queue = ranks.world_size > 1, queue_of(runner.device, runner.max_num_reqs)
        verifier = DelayedVerifier(controller, DeviceTimes(times), queue, speculator, *theirs, wait=alike)
    verifier.listeners, verifier.stats = told, stats
    speculator.decider = runner.adaptive_verification = verifier
    return verifier


def on_host(runner: Any) -> bool:
    """Whether the runner's device is the host, so that what was computed is there."""
    return bool(runner.device.type == "cpu")


def warn_of_another_block(speculator: Any) -> None:
    """Drafts of another length than the draft model was trained for."""
    hf, asked = speculator.draft_model_config.hf_config, speculator.num_speculative_steps
    trained = getattr(hf, "block_size", None) or getattr(hf, "dspark_block_size", None)
    if trained and trained != asked:
        logger.warning(
            "num_speculative_tokens=%s, but the draft model was trained for blocks of %s, all of whose tokens see each "
            "other: fewer drafts are accepted and confidences are off. Set it to %s.",
            asked,
            trained,
            trained,
        )


def affordable_costs(runner: Any, ranks: Any) -> CostTable | None:
    """What steps cost, for a budget of drafts; None, with a warning, where this engine cannot have one."""
    if problems := trimming_problems(runner.vllm_config):
        logger.warning("%s: it does not go with %s. %s", EVERY_DRAFT, " and ".join(problems), MEANT)
        return None
    try:
        return start_costs(runner, ranks, HOST if on_host(runner) else DEVICE)
    except Exception as error:  # whatever a model does in a dummy step, which vLLM itself may not run
        name = type(error).__name__
        logger.warning(
            "%s: a dummy step, to see what it costs, failed with %s: %s. %s", EVERY_DRAFT, name, error, MEANT
        )
        return None
