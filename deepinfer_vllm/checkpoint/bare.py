"""The V4.1 modules without an engine: one request, its own small caches, every intermediate value at hand."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from deepinfer_vllm.models.deepseek_v41.mhc import collapse
from deepinfer_vllm.models.deepseek_v41.model import DeepseekV41ForCausalLM
from deepinfer_vllm.models.deepseek_v41.step import Step

BLOCK_SIZE = 32
MAX_TOKENS = 16384


@dataclass
class Trace:
    """Values of one prompt of T tokens, on the CPU; float32 unless said otherwise."""

    logits: torch.Tensor
    """[T, V]."""
    hidden_states: torch.Tensor
    """[L + 2, T, D]: embedding; after each layer, the streams collapsed with its `pre`; after the final norm."""
    pre_mix: torch.Tensor
    """[L, T, M]."""
    streams_last: torch.Tensor
    """[L, M, D]: streams of the last token after each layer."""
    router_ids: torch.Tensor
    """[L, T, k] int64."""
    router_weights: torch.Tensor
    """[L, T, k]."""
    index_topk: dict[int, torch.Tensor] = field(default_factory=dict)
    """By index source: rows selected, [T, K] int64 ascending, -1 padded."""
    candidate_blocks: torch.Tensor | None = None
    """[T, P] int64, -1 padded; a row of only -1 admits every block."""
    engram_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    """By Engram layer: [T, columns] int64."""


class BareModel:
    """A loaded model driven directly. Greedy, one request at a time; not thread-safe.

    `close` ends the one-process group that vLLM's layers need; an engine may be started in this process after it.
    """

    def __init__(self, directory: str | Path, *, dtype: str = "float32", max_tokens: int = MAX_TOKENS) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        args = EngineArgs(
            model=str(directory),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=1 << 20,
        )
        self.vllm_config = args.create_engine_config()
        with set_current_vllm_config(self.vllm_config):
            join_group_of_one()
            try:
                self.model = _load(self.vllm_config)
            except BaseException:
                self.close()
                raise
        max_tokens = min(max_tokens, self.vllm_config.model_config.max_model_len)
        blocks = -(-max_tokens // BLOCK_SIZE)
        self._device = torch.device(self.vllm_config.device_config.device)
        self._table = torch.arange(1, blocks + 1, dtype=torch.int32, device=self._device).unsqueeze(0)
        self._caches = [m for m in self.model.modules() if isinstance(m, PagedCache)]
        for cache in self._caches:
            spec: Any = cache.spec
            shape = (blocks + 1, 1, cache.rows_per_block, spec.head_size)
            cache.bind_kv_cache(torch.zeros(shape, dtype=spec.dtype, device=self._device))

    def close(self) -> None:
        """Leave vLLM's process group."""
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()

    def prefill(self, ids: torch.Tensor, chunk: int | None = None, images: Sequence[torch.Tensor] = ()) -> Trace:
        """Run a prompt [T] int64, whole or `chunk` tokens at a time.

        images: embeddings [places, D] of each image; they take the image tokens of the prompt in order.
        """
        embeds, vision = None, self.model.config.vision
        if images:
            if vision is None:
                raise ValueError(f"{len(images)} images for a checkpoint without a vision tower: give none")
            is_image = ids == vision.image_token_id
            embeds = self.model.embed_input_ids(ids.to(self._device), list(images), is_multimodal=is_image)
        parts = _chunks(ids, chunk or len(ids))
        return _join(
            [
                self._forward(part, start, None if embeds is None else embeds[start : start + len(part)])
                for part, start in parts
            ]
        )

    def generate(self, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy continuation of a prompt [T]: (ids [count] int64, logits [count, V] that chose them)."""
        logits = [self._forward(ids, 0).logits[-1]]
        tokens = [logits[0].argmax()]
        for i in range(1, count):
            logits.append(self._forward(tokens[-1].view(1), len(ids) + i - 1).logits[-1])
            tokens.append(logits[-1].argmax())
        return torch.stack(tokens), torch.stack(logits)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, start: int, embeds: torch.Tensor | None = None) -> Trace:
        ids = ids.to(self._device)
        positions = torch.arange(start, start + len(ids), device=self._device)
        step = Step(
            positions=positions,
            request=torch.zeros_like(positions),
            spans=[(0, len(ids))],
            seq_lens=[start + len(ids)],
            tables={cache.name: self._table for cache in self._caches},
        )
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        with _recorded(self.model) as records:
            embeds = self.model.embed(ids) if embeds is None else embeds
            hidden = self.model.run(step, ids, embeds, trace=layers)
            logits = self.model.compute_logits(hidden)
        assert logits is not None
        collapsed = [collapse(streams, pre) for streams, pre in layers]
        return Trace(
            logits=logits.float().cpu(),
            hidden_states=torch.stack([embeds, *collapsed, hidden]).float().cpu(),
            pre_mix=torch.stack([pre for _, pre in layers]).cpu(),
            streams_last=torch.stack([streams[-1] for streams, _ in layers]).float().cpu(),
            router_ids=torch.stack(records.experts).cpu(),
            router_weights=torch.stack(records.weights).cpu(),
            index_topk={layer: rows.cpu() for layer, rows in records.selected.items()},
            candidate_blocks=None if step.candidates is None else step.candidates.cpu(),
            engram_rows={layer: rows.cpu() for layer, rows in step.engram_rows.items()},
        )


@dataclass
class _Records:
    experts: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    selected: dict[int, torch.Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def _recorded(model: DeepseekV41ForCausalLM) -> Iterator[_Records]:
    """Collect routing and selections while a step runs."""
    records = _Records()

    def routed(_: torch.nn.Module, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], __: torch.Tensor) -> None:
        records.experts.append(inputs[1])
        records.weights.append(inputs[2])

    def selected(module: Any, inputs: tuple[Any, ...], _: None) -> None:
        records.selected[module.role.layer_id] = inputs[-1].selected.clone()

    handles = []
    for layer in model.layers:
        handles.append(layer.ffn.experts.register_forward_hook(routed))
        if layer.attn.role.selects:
            handles.append(layer.attn.indexer.register_forward_hook(selected))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _chunks(ids: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size], start


def _join(parts: list[Trace]) -> Trace:
    """One trace of consecutive chunks."""
    if len(parts) == 1:
        return parts[0]

    def rows(tensors: list[torch.Tensor]) -> torch.Tensor:
        width = max(t.shape[1] for t in tensors)
        return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in tensors])

    return Trace(
        logits=torch.cat([p.logits for p in parts]),
        hidden_states=torch.cat([p.hidden_states for p in parts], dim=1),
        pre_mix=torch.cat([p.pre_mix for p in parts], dim=1),
        streams_last=parts[-1].streams_last,
        router_ids=torch.cat([p.router_ids for p in parts], dim=1),
        router_weights=torch.cat([p.router_weights for p in parts], dim=1),
        index_topk={k: rows([p.index_topk[k] for p in parts]) for k in parts[0].index_topk},
        candidate_blocks=None
        if parts[0].candidate_blocks is None
        else rows([p.candidate_blocks for p in parts if p.candidate_blocks is not None]),
        engram_rows={k: torch.cat([p.engram_rows[k] for p in parts]) for k in parts[0].engram_rows},
    )


def _load(vllm_config: Any) -> DeepseekV41ForCausalLM:
    """What vLLM's loader does, without the accelerator calls that only its model runners make harmless on a CPU."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config, device = vllm_config.model_config, torch.device(vllm_config.device_config.device)
    with set_default_torch_dtype(model_config.dtype):
        with device:
            model = initialize_model(vllm_config=vllm_config)
        get_model_loader(vllm_config.load_config).load_weights(model, model_config)
        process_weights_after_loading(model, model_config, device)
    if not isinstance(model, DeepseekV41ForCausalLM):
        raise TypeError(f"vLLM built {type(model).__module__}; set DEEPINFER_VLLM_MODEL=portable to check this model")
    model.eval()
    return model


def join_group_of_one() -> None:
    """vLLM's layers ask for their process group, so there must be one."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.platforms import current_platform

    if model_parallel_is_initialized():
        return
    rendezvous = os.path.join(tempfile.mkdtemp(prefix="deepinfer-"), "rendezvous")
    init_distributed_environment(1, 0, f"file://{rendezvous}", 0, backend=current_platform.dist_backend)
    initialize_model_parallel(1, 1)
