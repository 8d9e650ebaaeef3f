"""What the offline commands ask of a worker, added to vLLM's by `worker_extension_cls`."""

from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from deepinfer_vllm.spec_decode.arrivals import queue_of
from deepinfer_vllm.spec_decode.made import made_for
from deepinfer_vllm.spec_decode.records import Recorder
from deepinfer_vllm.spec_decode.speculator import ControlledSpeculator
from deepinfer_vllm.spec_decode.trace import Trace
from deepinfer_vllm.spec_decode.watcher import Watcher

logger = init_logger("vllm." + __name__)


class DSparkWorker:
    """Methods for `LLM.collective_rpc`. Only the first rank does something."""

    rank: int
    model_runner: Any
    dspark_recorder: Recorder
    dspark_decider: Any

    def dspark_begin_record(self, path: str) -> bool:
        """From now on, record the drafts of an engine that verifies all of them; see `Recorder`. Whether it can."""
        runner, speculator = self.model_runner, self.model_runner.speculator
        if not isinstance(speculator, ControlledSpeculator):
            return False
        if self.rank == 0:
            self.dspark_recorder = Recorder(Path(path), made_for(runner.vllm_config), logger.warning)
            bonus_tokens = runner.model_state.num_new_sampled_tokens_per_step
            self.dspark_decider = speculator.decider
            queue = queue_of(runner.device, runner.max_num_reqs)
            speculator.decider = Watcher(speculator, bonus_tokens, queue, [self.dspark_recorder])
        return True

    def dspark_end_record(self) -> None:
        """Write what is recorded, and record no more."""
        if self.rank == 0:
            self.model_runner.speculator.decider.settle(wait=True)
            self.dspark_recorder.close(timeout_seconds=60.0)
            self.model_runner.speculator.decider = self.dspark_decider

    def dspark_begin_trace(self, directory: str, limit_bytes: int) -> bool:
        """From now on, trace prompts into the directory; see `Trace`. Whether it can."""
        speculator = self.model_runner.speculator
        if not isinstance(speculator, ControlledSpeculator):
            return False
        if self.rank == 0:
            speculator.trace = Trace(Path(directory), limit_bytes, logger.warning)
        return True

    def dspark_end_trace(self) -> bool | None:
        """Trace no more. Whether the trace ended before, for its limit or for its disk; None of other ranks."""
        if self.rank != 0:
            return None
        speculator = self.model_runner.speculator
        trace, speculator.trace = speculator.trace, None
        return bool(trace.full)
