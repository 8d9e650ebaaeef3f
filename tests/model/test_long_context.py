"""Near the end of a long context nothing grows with tokens times context: neither scores nor rows nor masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from deepinfer_vllm.models.deepseek_v41 import gather_attention, indexer
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from deepinfer_vllm.models.deepseek_v41.step import Step
from small_model import SIZES, normal
from topologies import bare_model

CHUNK = 4096


class Largest(TorchDispatchMode):
    """The most bytes that any operation's new tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return out


def peak_bytes(record: profile) -> int:
    """The most bytes that tensors made in a profiled region held at once."""
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def test_no_array_and_no_peak_grows_with_tokens_times_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 4096 tokens of 16K and of 32K: their scores at 32K are 512 MB a head and layer."""
    workspace = 4 << 20
    monkeypatch.setattr(indexer, "WORKSPACE_BYTES", workspace)
    monkeypatch.setattr(gather_attention, "WORKSPACE_BYTES", workspace)
    sizes = {**SIZES, "max_position_embeddings": 32768, "index_n_heads": 2, "candidate_topk_blocks": 64}
    write_checkpoint(tmp_path, TextConfig(**sizes).published("float32"))
    largest, peak = {}, {}
    with bare_model(tmp_path, max_tokens=32768) as model:
        for number, module in enumerate(m for m in model.model.modules() if isinstance(m, PagedCache)):
            if module.kv_cache.is_floating_point():
                module.kv_cache.copy_(normal(number, *module.kv_cache.shape))
        tables = {m.name: model._table for m in model.model.modules() if isinstance(m, PagedCache)}
        for context in (16384, 32768):
            positions = torch.arange(context - CHUNK, context)
            step = Step(positions, torch.zeros(CHUNK, dtype=torch.int64), [(0, CHUNK)], [context], tables)
            ids = torch.randint(3, 300, (CHUNK,), generator=torch.Generator().manual_seed(1))
            with torch.inference_mode(), Largest() as mode:
                hidden = model.model.run(step, ids, model.model.embed(ids))
            assert bool(hidden.isfinite().all())
            largest[context] = mode.bytes
            with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
                model.model.run(step, ids, model.model.embed(ids))
            peak[context] = peak_bytes(record)
    assert largest[32768] == largest[16384] <= 8 << 20
    assert peak[32768] < 1.1 * peak[16384] <= 16 << 20
