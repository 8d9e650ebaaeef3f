"""A KV connector that keeps blocks of a prompt in this process: what one engine computed, the next one loads."""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

STORE: dict[tuple[int, tuple[int, ...]], dict[str, torch.Tensor]] = {}
"""Rows by layer, for each group and the tokens up to a block's end."""


@dataclass
class Plan(KVConnectorMetadata):
    """Blocks to load and to save in a step: (group, tokens up to the block's end, block id)."""

    loads: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)
    saves: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    """For prompts of one chunk. Groups that a hit does not find are left out, so their window is computed again."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self.layers = {g: group.layer_names for g, group in enumerate(groups) if group.kv_cache_spec.prefix_cacheable}
        self.size = groups[0].kv_cache_spec.block_size
        self.caches: dict[str, torch.Tensor] = {}
        self.external: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        ids = tuple(request.prompt_token_ids)
        found = (len(ids) - 1) // self.size * self.size
        there = all((group, ids[:found]) in STORE for group in self.layers)
        return (max(found - num_computed_tokens, 0) if there else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.external[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan = Plan()
        for new in scheduler_output.scheduled_new_reqs:
            ids, loaded = tuple(new.prompt_token_ids), self.external.pop(new.req_id, 0)
            for group in self.layers:
                for i, block in enumerate(new.block_ids[group][: len(ids) // self.size]):
                    end = (i + 1) * self.size
                    if block:  # 0: out of the window
                        (plan.loads if end <= loaded else plan.saves).append((group, ids[:end], block))
        return plan

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for group, ids, block in self._get_connector_metadata().loads:
            for layer in self.layers[group]:
                self.caches[layer][block].copy_(STORE[group, ids][layer])

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for group, ids, block in self._get_connector_metadata().saves:
            STORE[group, ids] = {layer: self.caches[layer][block].clone() for layer in self.layers[group]}


class WholeConnector(MemoryConnector):
    """Keeps every group's blocks, as a transfer of a request's own blocks does: nothing is computed again."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.layers = {g: group.layer_names for g, group in enumerate(kv_cache_config.kv_cache_groups)}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self.layers)
