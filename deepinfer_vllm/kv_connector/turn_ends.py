"""Windows where a turn ends, stored with the blocks before: the next prompt of a conversation begins with the answer.

vLLM keeps and stores the windows at a prompt's end only. In a model with windows that are not computed again, a
conversation would then hit no further than its last prompt, whatever is stored of the answer.
"""

import functools
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus


def retire_later(manager: Any, tokens: int) -> None:
    """Let vLLM keep a window group's blocks of a request for `tokens` tokens more, and admit requests accordingly.

    `manager`: vLLM's of the group. What a hit allocates and what attention sees are as before.
    """
    remove = manager.remove_skipped_blocks

    @functools.wraps(remove)
    def remove_later(request_id: str, computed_tokens: int, *rest: Any, **named: Any) -> Any:
        return remove(request_id, max(0, computed_tokens - tokens), *rest, **named)

    manager.remove_skipped_blocks = remove_later
    if manager.max_admission_blocks_per_request is not None:
        manager.max_admission_blocks_per_request += -(-tokens // manager.block_size)


class TurnEnds:
    """Lets vLLM's offloading store the windows before the last block that a request filled."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler`: vLLM's `OffloadingConnectorScheduler`."""
        self._scheduler = scheduler
        config = scheduler.config
        self._unit = config.alignment_tokens
        sparse = config.retention_interval is not None and self._unit is not None
        self._windows = [number for number, group in enumerate(config.kv_group_configs) if sparse and _is_window(group)]
        """Numbers of the groups whose windows vLLM, as it is configured, stores at some positions only."""

    def retain(self, kv_cache_manager: Any, tokens_ahead: int) -> None:
        """Let those windows outlive the tokens after the block's end.

        `tokens_ahead`: how far scheduling may run ahead of the tokens that a request ends with.
        """
        for number in self._windows:
            group = self._scheduler.config.kv_group_configs[number].group_idx
            retire_later(kv_cache_manager.coordinator.single_type_managers[group], self._unit + tokens_ahead)

    def finished(self, request: Any) -> None:
        """Make the end of a request, which vLLM has just been told of, a position that hits may reach."""
        scheduler, status = self._scheduler, self._scheduler._req_status.get(request.request_id)
        if status is None or not self._windows:
            return
        aborted = request.status is RequestStatus.FINISHED_ABORTED
        tokens = request.num_computed_tokens if aborted else max(request.num_prompt_tokens, request.num_tokens - 1)
        end = scheduler._calc_num_offloadable_tokens(status, tokens) // self._unit * self._unit
        if end <= (request.num_prompt_tokens - 1) // self._unit * self._unit:
            return
        request.shared_prefix_boundary = end
        for number in self._windows:
            group, state = scheduler.config.kv_group_configs[number], status.group_states[number]
            first = end // group.tokens_per_chunk - group.load_window_size_in_chunks(end)
            state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, max(0, first))


def _is_window(group: Any) -> bool:
    return isinstance(group.kv_cache_spec, SlidingWindowSpec) and not group.is_eagle_group
