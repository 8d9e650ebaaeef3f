"""Windows where a turn ends, stored with the blocks before: the next prompt of a conversation begins with the answer.

vLLM keeps and stores the windows at a prompt's end only. In a model with windows that are not computed again, a
conversation would then hit no further than its last prompt, whatever is stored of the answer.
"""

import functools
from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus


def retire_later(kv_cache_manager: Any, tokens: Mapping[int, int], max_model_len: int) -> bool:
    """Let vLLM keep a request's blocks for so many tokens more, by window group, and admit requests accordingly.

    What a hit allocates and what attention sees are as before. Nothing is changed, and False returned, where the
    longest request would then not fit into the engine's blocks: it would wait for ever.
    """
    managers = kv_cache_manager.coordinator.single_type_managers
    more = {group: -(-count // managers[group].block_size) for group, count in tokens.items()}
    longest = [
        min(-(-max_model_len // each.block_size), each.max_admission_blocks_per_request or max_model_len)
        for each in managers
    ]
    if sum(longest) + sum(more.values()) >= kv_cache_manager.block_pool.num_gpu_blocks:
        return False
    for group, count in tokens.items():
        manager = managers[group]
        manager.remove_skipped_blocks = _delayed(manager.remove_skipped_blocks, count)
        if manager.max_admission_blocks_per_request is not None:
            manager.max_admission_blocks_per_request += more[group]
    return True


def _delayed(remove: Any, tokens: int) -> Any:
    @functools.wraps(remove)
    def remove_later(request_id: str, computed_tokens: int, *rest: Any, **named: Any) -> Any:
        return remove(request_id, max(0, computed_tokens - tokens), *rest, **named)

    return remove_later


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

    def kept_longer(self) -> dict[int, int]:
        """For how many tokens these windows, by group, must outlive theirs: until the next block is full."""
        groups = (self._scheduler.config.kv_group_configs[number] for number in self._windows)
        return {group.group_idx: self._unit for group in groups}

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
