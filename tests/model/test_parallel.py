"""The model cut over several ranks gives what one process gives: golden checkpoints, every rank a thread."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from deepinfer_vllm.checkpoint.bare import BareModel
from deepinfer_vllm.checkpoint.topology import random_config
from deepinfer_vllm.checkpoint.vision import VisionConfig
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from deepinfer_vllm.models.deepseek_v41.expert_shard import ExpertShard
from deepinfer_vllm.models.deepseek_v41.experts import Experts
from deepinfer_vllm.models.deepseek_v41.parallel import tokens_over_dp
from deepinfer_vllm.models.deepseek_v41.replay import BatchFacts
from images import noise
from small_model import both_configs, fill, generator, make_step, normal

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LIMIT = 5e-5  # float32, sums in another order
LONG, SHORT = (torch.randint(500, (length,), generator=generator(length)) for length in (70, 9))


def make_shards(count: int, **how: Any) -> tuple[Experts, list[Experts]]:
    """The whole experts and those of every rank, loaded from them by name."""
    config, _ = both_configs()
    whole = Experts(config, torch.float32, ExpertShard.plan(config, 0, 1, by_expert=False))
    fill(whole, seed=1)
    parts = []
    for rank in range(count):
        part = Experts(config, torch.float32, ExpertShard.plan(config, rank, count, **how))
        for expert in range(config.num_experts):
            if not part.is_elsewhere(expert):
                gate, up = whole.w13[expert].chunk(2)
                for name, weight in (("w1", gate), ("w2", whole.w2[expert]), ("w3", up)):
                    part.load(expert, name, weight)
        parts.append(part)
    return whole, parts


@pytest.mark.parametrize(
    ("count", "how"),
    [
        (2, {"by_expert": False}),
        (4, {"by_expert": False}),
        (2, {"by_expert": True}),
        (3, {"by_expert": True}),
        (3, {"by_expert": True, "placement": "round_robin"}),
        (8, {"by_expert": True}),
    ],
)
def test_partial_experts_add_up(count: int, how: dict[str, Any]) -> None:
    whole, parts = make_shards(count, **how)
    experts = torch.rand(23, 8, generator=generator(2)).argsort(-1)[:, :2]
    x, weights = normal(4, 23, 32), normal(3, 23, 2)
    found = sum(part(x, experts, weights) for part in parts)
    torch.testing.assert_close(found, whole(x, experts, weights), rtol=1e-5, atol=1e-5)
    assert sum(part.w2.numel() + part.w13.numel() for part in parts) == whole.w2.numel() + whole.w13.numel()


def test_each_expert_is_held_once() -> None:
    """8 experts over 3 ranks: unevenly, and as vLLM places them."""
    config, _ = both_configs()
    plan = functools.partial(ExpertShard.plan, config, ranks=3, by_expert=True)
    assert [plan(rank=r).experts for r in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [plan(rank=r, placement="round_robin").experts for r in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_experts_beyond_the_model_are_nobodys() -> None:
    _, (first, second) = make_shards(2, by_expert=True)
    assert [first.is_elsewhere(e) for e in (3, 4, 8)] == [False, True, False]
    assert [second.is_elsewhere(e) for e in (3, 4, 8)] == [True, False, False]


@pytest.fixture
def groups(vllm_layers: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """groups(tp=, dp=): several ranks from here on."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return functools.partial(ranks.start, monkeypatch)


def load(name: str | Path, expert_parallel: bool = False) -> BareModel:
    """A golden checkpoint, of which the calling rank takes its part."""
    from vllm.engine import arg_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            arg_utils, "EngineArgs", functools.partial(arg_utils.EngineArgs, enable_expert_parallel=expert_parallel)
        )
        return BareModel(GOLDEN / name, max_tokens=128)


def load_ranks(group: ranks.Ranks, name: str | Path, expert_parallel: bool) -> list[BareModel]:
    models = []
    for rank in range(group.count):
        with group.of(rank):
            models.append(load(name, expert_parallel))
    return models


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(("name", "tp"), [("v41-tiny-a", 2), ("v41-tiny-b", 4), ("v41-tiny-a-fp8", 2)])
def test_tensor_parallel(groups: Any, name: str, tp: int, expert_parallel: bool) -> None:
    want = load(name).prefill(LONG)
    group = groups(tp=tp)
    models = load_ranks(group, name, expert_parallel)
    experts = [m.model.layers[0].ffn.experts for m in models]
    held = sum(math.prod(part.held("w2", place).shape) for part in experts for place in range(len(part.shard.experts)))
    assert held == 8 * 32 * 128 and models[0].model.layers[0].attn.wo_a.weight.shape == (4 * 32 // tp, 8 * 64 // 4)
    for got in group.run(lambda rank: models[rank].prefill(LONG, chunk=50)):
        assert (got.logits - want.logits).abs().max() <= LIMIT
        assert torch.equal(got.router_ids, want.router_ids)


def test_a_tower_and_an_odd_vocabulary(groups: Any, tmp_path: Path) -> None:
    from vllm.models.deepseek_v41.common.mm_preprocess import DeepseekV4VLProcessor

    write_checkpoint(tmp_path, random_config(26, vision=VisionConfig()), seed=1)
    whole = load(tmp_path)
    assert whole.model.config.vocab_size % 2 == 1
    images = DeepseekV4VLProcessor(whole.vllm_config.model_config.hf_config)(images=[noise(100, 60), noise(33, 300)])
    ids = LONG % 300

    def values(bare: BareModel) -> list[torch.Tensor]:
        return [bare.prefill(ids).logits, *bare.model.embed_multimodal(**images)]

    with torch.inference_mode():
        want = values(whole)
    group = groups(tp=2)
    models = load_ranks(group, tmp_path, expert_parallel=True)
    for got in group.run(lambda rank: values(models[rank])):
        assert [float((a - b).abs().max()) <= LIMIT for a, b in zip(got, want, strict=True)] == [True] * 3


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize(("tp", "expert_parallel"), [(1, False), (1, True), (2, True)])
def test_data_parallel(
    groups: Any, monkeypatch: pytest.MonkeyPatch, tp: int, expert_parallel: bool, replayed: bool
) -> None:
    """Two ranks with prompts of their own, the second soon without one. Past the cut, each narrows its own tokens."""
    monkeypatch.setenv("DEEPINFER_VLLM_DECODER_REPLAY", str(int(replayed)))
    facts = BatchFacts(keep_all=[False], first_computed=[0]) if replayed else None
    whole = load("v41-tiny-a")
    with torch.inference_mode():
        want = [steps(whole, LONG, 2, facts, several=False), steps(whole, SHORT, 1, facts, several=False)]
    group = groups(tp=tp, dp=2)
    models = load_ranks(group, "v41-tiny-a", expert_parallel)

    def work(rank: int) -> torch.Tensor:
        if rank < tp:
            return steps(models[rank], LONG, 2, facts, several=True)
        logits = steps(models[rank], SHORT, 1, facts, several=True)
        model = models[rank].model
        model._accompany(model.embed(torch.tensor([0])), tokens_over_dp(1))
        return logits

    for rank, got in enumerate(group.run(work)):
        assert (got - want[rank // tp]).abs().max() <= LIMIT


def steps(bare: BareModel, ids: torch.Tensor, count: int, facts: BatchFacts | None, *, several: bool) -> torch.Tensor:
    """Logits [T, V] of a prompt prefilled in `count` equal steps, told what vLLM tells the model."""
    model, logits, size = bare.model, [], len(ids) // count
    for start in range(0, len(ids), size):
        step = make_step([(start, start + size)], {cache.name: bare._table for cache in bare._caches})
        step.dp_tokens = tokens_over_dp(size) if several else None
        part = ids[start : start + size]
        logits.append(model.compute_logits(model.run(step, part, model.embed(part), facts)))
    return torch.cat(logits)
