"""The draft model driven directly: caches in scattered blocks, slots and steps as vLLM's speculator makes them."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_vllm.checkpoint.bare import BareModel
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from deepinfer_vllm.models.deepseek_v41.dspark import DSparkV41DraftModel
from small_model import bind, make_step, scattered

UNWRITTEN = 1e3


def build(target: BareModel) -> Any:
    """The draft model of a checkpoint, not loaded."""
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = target.vllm_config
    config.speculative_config = SpeculativeConfig(
        method="dspark",
        num_speculative_tokens=5,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    assert isinstance(model, DSparkV41DraftModel)
    return model


class BareDraft:
    """The draft layers of the checkpoint of `target`. `clear` first: it makes the caches."""

    def __init__(self, target: BareModel) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        config = target.vllm_config
        model = build(target)
        draft = config.speculative_config.draft_model_config
        with set_current_vllm_config(config):
            get_model_loader(config.load_config).load_weights(model, draft)
            process_weights_after_loading(model, draft, torch.device("cpu"))
        model.model.embed_tokens, model.lm_head = target.model.embed, target.model.head  # as vLLM's speculator does
        self.model = model.eval()
        self.caches = [m for m in model.modules() if isinstance(m, PagedCache)]
        assert [cache.name for cache in self.caches] == model.get_draft_kv_cache_layer_names()
        self.rows_per_block = self.caches[0].rows_per_block

    def clear(self, requests: int = 1, tokens: int = 160) -> None:
        """Caches for so many requests of so many tokens each, filled with what must never be seen."""
        blocks = -(-tokens // self.rows_per_block)
        self.tables = [scattered(requests, blocks, seed=i) for i in range(len(self.caches))]
        for cache in self.caches:
            bind(cache, requests * blocks + 1, fill_value=UNWRITTEN)

    def store(self, request: int, states: torch.Tensor, start: int, rejected: int = 0) -> None:
        """Write the context rows of the target's states [T, layers * D] from position `start`, but for the rejected."""
        positions = torch.arange(start, start + len(states))
        slots = []
        for table in self.tables:
            block = table[request, positions // self.rows_per_block].long()
            slot = block * self.rows_per_block + positions % self.rows_per_block
            slot[len(slot) - rejected :] = -1
            slots.append(slot)
        combined = self.model.combine_hidden_states(states)
        self.model.precompute_and_store_context_kv(combined, positions, slots)

    def rows(self, layer: int, request: int, count: int) -> torch.Tensor:
        """The first `count` rows of a request in one layer."""
        index = torch.arange(count)
        return self.caches[layer].read(self.tables[layer], torch.full_like(index, request), index)

    @torch.inference_mode()
    def block(self, starts: list[int], anchors: list[int], lengths: list[int], noise: int) -> torch.Tensor:
        """Hidden states of one block a request, side by side; request i's begins at position starts[i]."""
        tables = {cache.name: table for cache, table in zip(self.caches, self.tables, strict=True)}
        step = make_step([(s, s + n) for s, n in zip(starts, lengths, strict=True)], tables)
        step.is_block = True
        ids = [[anchor] + [noise] * (n - 1) for anchor, n in zip(anchors, lengths, strict=True)]
        return self.model.model(self.model.embed_input_ids(torch.tensor(sum(ids, []))), step)

    @torch.inference_mode()
    def sample(self, hidden: torch.Tensor, anchor: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """(tokens, logits [G, V], confidence [G]) of one block [G, D], greedily, as vLLM's speculator does."""
        base = self.model.compute_draft_logits(hidden)
        previous, tokens, logits, embeds = torch.tensor([anchor]), [], [], []
        for k in range(len(hidden)):
            embeds.append(self.model.markov_embed(previous))
            logits.append(base[k : k + 1] + self.model.markov_bias(embeds[-1]))
            previous = self.model.map_draft_to_target(logits[-1].argmax(-1))
            tokens.append(int(previous))
        return tokens, torch.cat(logits), self.model.compute_confidence(hidden, torch.cat(embeds))
