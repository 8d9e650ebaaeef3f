"""Blocks on their way out of the engine, copied before they are given to someone else."""

import functools
from typing import Any


def flush_before_zeroing() -> None:
    """Let runner V2 ask its connector to finish with reallocated blocks before it zeroes or overwrites them.

    It asks before the forward pass, but after it has zeroed new blocks: what was still to be copied is then zeros,
    under the name of the block that was there. Runner V1 asks first. The runner's own call then finds nothing to do.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    update = GPUModelRunner.update_requests
    if hasattr(update, "deepinfer_hooked"):
        return

    @functools.wraps(update)
    def flush_and_update(self: Any, scheduler_output: Any) -> Any:
        plan = scheduler_output.kv_connector_metadata
        if plan is not None and has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(plan)
        return update(self, scheduler_output)

    flush_and_update.deepinfer_hooked = True  # type: ignore[attr-defined]
    GPUModelRunner.update_requests = flush_and_update
