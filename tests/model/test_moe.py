"""Experts against a loop over tokens, and the whole mixture against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41 import experts as experts_module
from deepinfer_vllm.models.deepseek_v41.expert_shard import ExpertShard
from deepinfer_vllm.models.deepseek_v41.experts import Experts, runs, swiglu
from deepinfer_vllm.models.deepseek_v41.moe import MoE
from reference import moe as reference
from small_model import both_configs, fill, generator, normal

TOKENS = 23


def expert_weights(experts: Experts, prefix: str) -> dict[str, torch.Tensor]:
    """The stacked weights under their published names."""
    out = {}
    for e in range(experts.w2.shape[0]):
        gate, up = experts.w13[e].double().chunk(2)
        out |= {f"{prefix}.{e}.w1.weight": gate, f"{prefix}.{e}.w3.weight": up}
        out[f"{prefix}.{e}.w2.weight"] = experts.w2[e].double()
    return out


def make_experts(**changes: object) -> Experts:
    config, _ = both_configs(**changes)
    experts = Experts(config, torch.float32, ExpertShard.plan(config, 0, 1, by_expert=False))
    fill(experts, seed=1)
    return experts


def loop(module: Experts, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, limit: float) -> torch.Tensor:
    w = expert_weights(module, "e")
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for e, weight in zip(experts[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = w[f"e.{e}.w1.weight"] @ x[t].double(), w[f"e.{e}.w3.weight"] @ x[t].double()
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[t] += weight * (w[f"e.{e}.w2.weight"] @ (gate / (1 + (-gate).exp()) * up))
    return out


@pytest.mark.parametrize("limit", [0.0, 0.3, 10.0])
@pytest.mark.parametrize("used", [[0, 1, 2, 3, 4, 5, 6, 7], [2, 5, 7], [0]])
def test_experts(used: list[int], limit: float) -> None:
    """Some experts may get no token; a token's experts come in any order."""
    module, k = make_experts(swiglu_limit=limit), min(2, len(used))
    order = torch.rand(TOKENS, len(used), generator=generator(2)).argsort(-1)[:, :k]
    experts, weights, x = torch.tensor(used)[order], normal(3, TOKENS, k), normal(4, TOKENS, 32)
    got = module(x, experts, weights)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), loop(module, x, experts, weights, limit), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pairs", [1, 5, 16, 10_000])
def test_runs_of_experts_do_not_matter(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "RUN_PAIRS", pairs)
    assert [*runs([0, 3, 0, 5, 7, 0, 2, 0])] == {
        1: [[1], [3], [4], [6]],
        5: [[1], [3], [4], [6]],
        16: [[1, 3, 4], [6]],
        10_000: [[1, 3, 4, 6]],
    }[pairs]
    assert [*runs([0, 0])] == []
    module, x = make_experts(), normal(4, TOKENS, 32)
    experts = torch.rand(TOKENS, 8, generator=generator(2)).argsort(-1)[:, :2]
    got = module(x, experts, normal(3, TOKENS, 2))
    torch.testing.assert_close(
        got.double(), loop(module, x, experts, normal(3, TOKENS, 2), module.limit), rtol=1e-4, atol=1e-5
    )


def test_no_tokens() -> None:
    nobody = torch.zeros(0, 2)
    assert make_experts()(torch.zeros(0, 32), nobody.long(), nobody).shape == (0, 32)


def test_loading_an_expert_fills_its_part_alone() -> None:
    module = make_experts()
    before = expert_weights(module, "e")
    for name in ("w1", "w2", "w3"):
        module.load(3, name, torch.full(before[f"e.3.{name}.weight"].shape, 7.0))
    after = expert_weights(module, "e")
    for name, values in after.items():
        assert torch.equal(values, torch.full_like(values, 7.0) if ".3." in name else before[name]), name


def test_an_expert_of_another_shape_is_refused() -> None:
    for shape in ((1, 32), (16, 1), (16,), (1,)):  # all of which broadcast
        with pytest.raises((RuntimeError, ValueError)):
            make_experts().load(0, "w1", torch.zeros(shape))


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_swiglu(limit: float) -> None:
    gate, up = torch.tensor([-30.0, -2, 0, 1, 1.6, 30]), torch.tensor([3.0, -9, 5, -1, 1.7, 1])
    got = swiglu(gate, up, limit)
    for i in range(6):
        g, u = float(gate[i]), float(up[i])
        if limit:
            g, u = min(g, limit), max(-limit, min(u, limit))
        assert float(got[i]) == pytest.approx(g / (1 + math.exp(-g)) * u, rel=1e-5)


@pytest.mark.usefixtures("vllm_layers")
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_the_mixture_is_that_of_the_reference(shared: int) -> None:
    ours, theirs = both_configs(n_shared_experts=shared, swiglu_limit=0.8)
    module = MoE(ours, torch.float32, "ffn")
    weights = fill(module, seed=5, prefix="layers.0.ffn.") | expert_weights(module.experts, "layers.0.ffn.experts")
    assert hasattr(module, "shared_experts") == bool(shared)
    if shared:
        assert weights["layers.0.ffn.shared_experts.w1.weight"].shape == (16 * shared, 32)
    x = normal(6, TOKENS, 32)
    is_image = torch.arange(TOKENS) % 4 == 0
    want, *_ = reference.moe(x.double(), 0, weights, theirs, is_image)
    torch.testing.assert_close(module(x, is_image).double(), want, rtol=1e-4, atol=1e-5)
