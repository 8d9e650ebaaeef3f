"""DSpark's draft model of DeepSeek-V4.1 as vLLM's speculator drives it.

After each step of the target the speculator hands over the target's states and has their context rows written, runs
one block of anchor and noise through `forward`, then samples its tokens from left to right: the logits of position k
are those of the block plus what the token before it adds. Methods keep the names of vLLM's own draft models.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from deepinfer_vllm import envs
from deepinfer_vllm.models.deepseek_v41 import replay, weights
from deepinfer_vllm.models.deepseek_v41.batch_invariance import take_over
from deepinfer_vllm.models.deepseek_v41.dspark_block import DraftBlock
from deepinfer_vllm.models.deepseek_v41.dspark_config import DraftConfig
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.safetensors_map import CHECKPOINT_FILES
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.weight_storage import WeightStorage


class DSparkV41DraftModel(nn.Module):
    """The draft layers of a V4.1 checkpoint. Embedding and head are the target's, set by vLLM's speculator."""

    allow_patterns_overrides = [CHECKPOINT_FILES]
    has_own_embed_tokens = False
    has_own_lm_head = False
    draft_id_to_target_id = None
    """Draft ids are the target's."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.speculative_config.draft_model_config
        self.draft_config = DraftConfig.from_hf(model_config.hf_config)
        self.config = config = self.draft_config.model
        self.model = DraftBlock(
            self.draft_config,
            Numerics(quantised=envs.DEEPINFER_VLLM_NUMERICS == "qat"),
            vllm_config.cache_config.block_size,
            vllm_config.model_config.dtype,
            vllm_config.compilation_config.static_forward_context,
            f"{prefix}." if prefix else "",
            rebuilt=config.replay_cut >= 0 and replay.enabled(vllm_config),
            storage=WeightStorage(
                vllm_config.model_config.dtype,
                envs.DEEPINFER_VLLM_WEIGHTS,
                weights.checkpoint_directory(model_config.model, model_config.revision),
            ),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        take_over(self)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, hidden]."""
        return self.model.embed_tokens(input_ids)

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's states [T, layers * hidden], side by side, to what draft layers read of them [T, hidden]."""
        return self.model.combine(aux_hidden_states)

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        """The cache of each draft layer, in the order of `context_slot_mappings`."""
        return [layer.attn.window_rows.name for layer in self.model.mtp]

    @torch.inference_mode()
    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mappings: list[torch.Tensor | None] | None = None,
    ) -> None:
        """Write the rows of combined states [T, hidden] at their slots; without slots, as in profiling, nothing."""
        if context_slot_mappings is not None:
            self.model.write_context(context_states, context_positions, context_slot_mappings)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Anchor and noise of a request [T] to hidden states [T, hidden] before the final norm, zeros for padding."""
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        metadata = get_forward_context().attn_metadata
        if not metadata:  # vLLM sizing memory: no cache is there to read
            return embeds
        step = Step.from_metadata(metadata, positions, is_block=True)
        hidden = self.model(embeds[: step.num_tokens], step)
        return nn.functional.pad(hidden, (0, 0, 0, positions.shape[0] - hidden.shape[0]))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, vocabulary], without what the token before adds."""
        return self.logits_processor(self.lm_head, self.model.mtp[-1].norm(hidden_states))

    def compute_draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The same over the draft vocabulary, which is the target's."""
        return self.compute_logits(hidden_states)

    def map_draft_to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids are the target's."""
        return draft_ids

    def markov_embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] to [n, rank]."""
        return self.model.mtp[-1].markov_head.embed(token_ids)

    def markov_bias(self, markov_embed: torch.Tensor) -> torch.Tensor:
        """What a token [n, rank] adds to the logits of the next: [n, vocabulary]."""
        return self.model.mtp[-1].markov_head.head(markov_embed)

    def compute_confidence(self, head_hidden: torch.Tensor, markov_embed: torch.Tensor) -> torch.Tensor:
        """How likely each drafted token is accepted, [n] float32, from its hidden state and its predecessor."""
        assert self.model.confidence_head is not None, "the checkpoint has no confidence head"
        return self.model.confidence_head(head_hidden, markov_embed)

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """vLLM's hook: shards of the target's tensors alone are not read."""
        return not weights.is_draft(name)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's hook: fill the parameters from the `mtp.*` tensors of a published checkpoint."""
        filled = weights.fill(self.model, ((name, t) for name, t in tensors if weights.is_draft(name)))
        return {f"model.{name}" for name in filled}
