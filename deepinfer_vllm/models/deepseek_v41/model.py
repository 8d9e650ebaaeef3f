"""DeepSeek-V4.1 for vLLM: the model, assembled and driven one step at a time."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.multimodal import MULTIMODAL_REGISTRY

from deepinfer_vllm import compat, envs
from deepinfer_vllm.models.announce import announce
from deepinfer_vllm.models.deepseek_v41 import images, replay, weights
from deepinfer_vllm.models.deepseek_v41.attention import Attention
from deepinfer_vllm.models.deepseek_v41.balanced_model import BalancedModel
from deepinfer_vllm.models.deepseek_v41.batch_invariance import single, take_over
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.dspark_config import DraftConfig
from deepinfer_vllm.models.deepseek_v41.engram import Engram
from deepinfer_vllm.models.deepseek_v41.layer import DecoderLayer
from deepinfer_vllm.models.deepseek_v41.mhc import begin, collapse
from deepinfer_vllm.models.deepseek_v41.moe import MoE
from deepinfer_vllm.models.deepseek_v41.ngram_history import NgramHistory
from deepinfer_vllm.models.deepseek_v41.norm import RMSNorm
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.parallel import tokens_over_dp
from deepinfer_vllm.models.deepseek_v41.replay import BatchFacts
from deepinfer_vllm.models.deepseek_v41.safetensors_map import CHECKPOINT_FILES
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.topology import check, layer_role
from deepinfer_vllm.models.deepseek_v41.weight_storage import WeightStorage
from deepinfer_vllm.models.deepseek_v41.windows import Windows
from deepinfer_vllm.native import invariance


@MULTIMODAL_REGISTRY.register_processor(images.processor, info=images.processing_info, dummy_inputs=images.dummy_inputs)
class DeepseekV41ForCausalLM(nn.Module, SupportsEagle3, images.SeesImages, BalancedModel):
    """V4.1, with a tower when the checkpoint has one. Module names are the published checkpoint's tensor names."""

    allow_patterns_overrides = [CHECKPOINT_FILES]
    """vLLM's hook: the files its loader reads."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.config = config = ModelConfig.from_hf(model_config.hf_config)
        check(config)
        self.vllm_config = vllm_config
        self.directory = weights.checkpoint_directory(model_config.model, model_config.revision)
        dtype, block_size = model_config.dtype, vllm_config.cache_config.block_size
        registry = vllm_config.compilation_config.static_forward_context
        numerics = Numerics(quantised=envs.DEEPINFER_VLLM_NUMERICS == "qat")
        if invariance.decide() is not invariance.Way.NONE:
            compat.list_lower_ids_first()
            compat.limit_rows_by_themselves()
            compat.list_for_each_what_it_asked()
        if vllm_config.use_v2_model_runner:
            compat.drop_logprobs_of_padding()
        self.replay = config.replay_cut >= 0 and replay.enabled(vllm_config)
        compat.hook_seeded_sampling()
        compat.add_cpu_collectives()
        if self.replay and not vllm_config.use_v2_model_runner:
            compat.hook_runner()
        storage = WeightStorage(dtype, envs.DEEPINFER_VLLM_WEIGHTS, self.directory)
        windows = Windows.plan(config, replay_tokens=config.window if self.replay else 0)
        base = f"{prefix}." if prefix else ""

        self.embed = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f"{base}embed")
        sources: dict[int, PagedCache] = {}
        layers = []
        for layer_id in range(config.num_layers):
            name = f"{base}layers.{layer_id}"
            attention = Attention(
                config,
                layer_role(config, layer_id),
                numerics,
                block_size,
                dtype,
                registry,
                sources,
                f"{name}.attn",
                windows=windows,
                rebuilt=self.replay and layer_id > config.replay_cut,
                storage=storage,
            )
            engram = None
            if config.engram is not None and layer_id in config.engram.layer_ids:
                engram = Engram(config, config.engram, dtype, f"{name}.engram", storage)
            layers.append(
                DecoderLayer(config, attention, engram, MoE(config, dtype, f"{name}.ffn", storage, balanced=True))
            )
        self.layers = nn.ModuleList(layers)
        self._announce_experts(vllm_config.parallel_config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=f"{base}head")
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.aux_layers: tuple[int, ...] = ()
        if config.engram is not None:
            self.history = NgramHistory(
                config, config.engram, self.directory, block_size, windows, registry, f"{base}layers"
            )
        self.build_tower(config, vllm_config)
        take_over(self)
        announce(self, vllm_config, self.replay)

    def _announce_experts(self, parallel: Any) -> None:
        slots = [layer.ffn.slots for layer in self.layers if layer.ffn.slots is not None]
        if slots:
            ranks = parallel.world_size_across_dp
            self.announce_experts(slots, self.config.num_experts, parallel.eplb_config.num_redundant_experts, ranks)

    @property
    def model(self) -> SimpleNamespace:
        """Where vLLM's speculators look for the embedding that a draft model shares."""
        return SimpleNamespace(embed_tokens=self.embed)

    @property
    def lm_head(self) -> nn.Module:
        """The head, which a draft model shares, by vLLM's name."""
        return self.head

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """vLLM's hook: from now on `forward` also returns the mean streams at the entry of these layers, ascending."""
        self.aux_layers = layers

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """vLLM's hook, where a draft model's config names no layers: those of this one's own DSpark layers."""
        return DraftConfig.from_hf(self.vllm_config.model_config.hf_config).target_layers

    def get_model_state_cls(self) -> type[Any]:
        """Runner V2's hook: what it keeps for this model."""
        from deepinfer_vllm.models.deepseek_v41.model_state import ReplayModelState

        return ReplayModelState

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's hook: [T] to [T, hidden], with the places that `is_multimodal` [T] marks taken from the images."""
        embeds = self.embed(input_ids)
        if multimodal_embeddings:
            assert is_multimodal is not None
            places = is_multimodal.nonzero().squeeze(1)  # on the host, where vLLM makes the mask: nobody waits
            embeds[places.to(embeds.device)] = torch.cat(list(multimodal_embeddings)).to(embeds.dtype)
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        facts: BatchFacts | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """vLLM's hook: hidden states [T, hidden] after the final norm; zeros for tokens that replay skipped.

        With auxiliary layers set, also a list of their states, each [T, hidden] and zero likewise. Runner V2 gives
        `facts` (`model_state`); V1 gives them in the context (`compat.hook_runner`).
        """
        context = get_forward_context()
        across = context.dp_metadata
        dp_tokens = None if across is None else across.num_tokens_across_dp_cpu.tolist()
        if not context.attn_metadata:  # vLLM sizing memory, or other ranks' turn: no cache is there to read
            hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
            if dp_tokens is not None:
                self._accompany(hidden, dp_tokens)
            return (hidden, [hidden] * len(self.aux_layers)) if self.aux_layers else hidden
        step = Step.from_metadata(context.attn_metadata, positions, dp_tokens=dp_tokens)
        known = context.additional_kwargs.get(compat.BATCH_FACTS)  # not in vLLM's dummy batches
        facts = facts or (BatchFacts(*known) if known else None)
        ids = None if input_ids is None else input_ids[: step.num_tokens]
        embeds = self.embed(ids) if inputs_embeds is None else inputs_embeds[: step.num_tokens]
        aux: list[torch.Tensor] = []
        if invariance.by_tokens():
            hidden = self._one_by_one(step, ids, embeds, aux)
        else:
            hidden = self.run(step, ids, embeds, facts if self.replay else None, aux=aux)
        padding = (0, 0, 0, positions.shape[0] - hidden.shape[0])
        hidden, *aux = (nn.functional.pad(states, padding) for states in (hidden, *aux))
        return (hidden, aux) if self.aux_layers else hidden

    def _one_by_one(
        self, step: Step, ids: torch.Tensor | None, embeds: torch.Tensor, aux: list[torch.Tensor]
    ) -> torch.Tensor:
        """`run`, each token by itself."""
        found: list[tuple[torch.Tensor, ...]] = []
        for token in range(step.num_tokens):
            own: list[torch.Tensor] = []
            part = slice(token, token + 1)
            hidden = self.run(single(step, token), None if ids is None else ids[part], embeds[part].clone(), aux=own)
            found.append((hidden, *own))
        hidden, *states = (torch.cat(rows) for rows in zip(*found, strict=True))
        aux += states
        return hidden

    def _accompany(self, embeds: torch.Tensor, dp_tokens: list[int]) -> None:
        """Send nobody's tokens [T, hidden] through every layer's experts, for the other ranks wait for them there."""
        for layer_id, layer in enumerate(self.layers):
            if layer_id == self.config.replay_cut and self.replay:
                dp_tokens = tokens_over_dp(len(embeds))
            layer.ffn(embeds, dp_tokens=dp_tokens)

    def run(
        self,
        step: Step,
        ids: torch.Tensor | None,
        embeds: torch.Tensor,
        facts: BatchFacts | None = None,
        trace: "list[tuple[torch.Tensor, torch.Tensor]] | None" = None,
        aux: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """One step without vLLM's context: ids [T], embeds [T, hidden] to [T, hidden].

        `facts` switches decoder-side replay on. `trace` collects (streams, pre) of every layer, `aux` the mean streams
        [T, hidden] at the entry of each of `aux_layers`.
        """
        if facts is not None:
            step.cached = replay.cached_tokens(step, facts)
        if self.config.vision is not None and ids is not None:
            step.mark_images(ids, self.config.vision)
        if self.config.engram is not None:
            if ids is None:
                raise ValueError("DeepSeek-V4.1 with Engram hashes token ids: prompt embeddings cannot be served")
            step.engram_rows = self.history(ids, step)
        streams, pre = begin(embeds, self.config.hc_mult)
        kept: torch.Tensor | None = None
        for layer_id, layer in enumerate(self.layers):
            if aux is not None and layer_id in self.aux_layers:
                aux.append(_spread(streams.float().mean(dim=1).to(streams.dtype), kept, embeds))
            streams, x = layer.write(streams, pre, step)
            if layer_id == self.config.replay_cut and facts is not None:
                narrowed = replay.narrow(step, self.config.window, facts)
                if narrowed is not None:
                    step, kept = narrowed
                    streams, x = streams[kept], x[kept]
            if layer_id == self.config.replay_cut and self.replay and step.dp_tokens is not None:
                step.dp_tokens = tokens_over_dp(step.num_tokens)  # other ranks may have narrowed theirs
            streams, pre = layer.attend(streams, x, step)
            if trace is not None:
                trace.append((streams, pre))
        return _spread(self.norm(collapse(streams, pre)), kept, embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """vLLM's hook: [n, hidden] to [n, vocabulary]."""
        if invariance.by_tokens() and len(hidden_states) > 1:
            return torch.cat([self.logits_processor(self.head, row.clone()) for row in hidden_states.split(1)])
        return self.logits_processor(self.head, hidden_states)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's hook: fill the parameters from a published checkpoint's tensors."""
        return weights.load(self, tensors)


def _spread(rows: torch.Tensor, kept: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """rows [T', hidden] at their places `kept` among zeros of the shape of `like`; as they are where all were kept."""
    return rows if kept is None else rows.new_zeros(like.shape).index_copy_(0, kept, rows)
