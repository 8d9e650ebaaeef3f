"""Routing against the reference, and the parts of it one by one."""

import math

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.router import Router
from reference import moe as reference
from small_model import both_configs, fill, normal

TOKENS = 40


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"gate_temp": 0.5},
        {"gate_temp": 2.0},
        {"topk_method": "greedy"},  # no bias
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"num_experts_per_tok": 8, "routed_scaling_factor": 2.5},
    ],
    ids=str,
)
def test_as_the_reference(changes: dict[str, object], images: bool) -> None:
    ours, theirs = both_configs(**changes)
    router = Router(ours)
    weights = fill(router, seed=1, prefix="f.gate.")
    assert (router.bias is None) == ("topk_method" in changes)
    x = normal(2, TOKENS, 32)
    is_image = torch.arange(TOKENS) % 3 == (1 if images else -1)
    experts, mix = router.route(x, is_image if images else None)
    want_experts, want_mix = reference.route(x.double(), weights, "f", theirs, is_image)
    assert torch.equal(experts, want_experts) and mix.dtype == torch.float32
    torch.testing.assert_close(mix.double(), want_mix, rtol=1e-5, atol=1e-6)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    config, _ = both_configs()
    router = Router(config)
    fill(router, seed=3)
    x = normal(4, TOKENS, 32)
    router.bias.data = torch.tensor([0.0, 0, 0, 100, 0, 0, 0, -100])
    experts, weights = router.route(x)
    assert bool((experts == 3).any(-1).all()) and not bool((experts == 7).any())
    assert float(weights.max()) <= config.routed_scaling_factor


def test_a_lone_expert_keeps_its_score() -> None:
    config, _ = both_configs(num_experts_per_tok=1, routed_scaling_factor=1.5)
    router = Router(config)
    fill(router, seed=5)
    x = normal(6, TOKENS, 32)
    experts, weights = router.route(x)
    for t in range(TOKENS):
        logit = float(router.weight[experts[t, 0]].double() @ x[t].double())
        assert float(weights[t, 0]) == pytest.approx(1.5 * math.sqrt(math.log1p(math.exp(logit))), rel=1e-5)


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_scoring_functions(scoring: str) -> None:
    config, _ = both_configs(scoring_func=scoring, topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1)
    router = Router(config)
    fill(router, seed=7)
    x = normal(8, TOKENS, 32)
    experts, weights = router.route(x)
    for t in range(TOKENS):
        logits = (router.weight.double() @ x[t].double()).tolist()
        scores = {
            "sqrtsoftplus": [math.sqrt(math.log1p(math.exp(v))) for v in logits],
            "sigmoid": [1 / (1 + math.exp(-v)) for v in logits],
            "softmax": [math.exp(v) / sum(map(math.exp, logits)) for v in logits],
        }[scoring]
        order = sorted(range(8), key=lambda e: -scores[e])[: config.num_experts_per_token]
        assert experts[t].tolist() == order
        assert weights[t].tolist() == pytest.approx([scores[e] for e in order], rel=1e-5)


def test_scores_far_from_zero() -> None:
    """No overflow above, no NaN where every score of a token vanishes."""
    config, _ = both_configs(topk_method="greedy", routed_scaling_factor=1)
    router = Router(config)
    router.weight.data = torch.eye(8, 32)
    x = torch.zeros(2, 32)
    x[0, :8] = torch.tensor([1e4, 4e4, 0, 0, 0, 0, 0, 0])
    x[1, :8] = -1e4
    experts, weights = router.route(x)
    assert experts[0].tolist() == [1, 0] and weights[0].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert bool(weights.isfinite().all())


def test_routing_is_float32_in_a_model_of_less() -> None:
    config, _ = both_configs()
    router = Router(config)
    fill(router, seed=9)
    x = normal(10, TOKENS, 32).bfloat16()
    for got, want in zip(router.route(x), router.route(x.float()), strict=True):
        assert torch.equal(got, want)


def test_image_tokens_have_a_bias_of_their_own() -> None:
    config, _ = both_configs()
    router = Router(config)
    fill(router, seed=7)
    router.bias.data = torch.tensor([100.0, 0, 0, 0, 0, 0, 0, 0])
    router.bias_vl.data = torch.tensor([0.0, 0, 0, 0, 0, 100, 0, 0])
    x = normal(8, TOKENS, 32)
    is_image = torch.arange(TOKENS) < 7
    experts, _ = router.route(x, is_image)
    assert experts[:, 0].tolist() == [5] * 7 + [0] * (TOKENS - 7)
    assert torch.equal(router.route(x)[0], router.route(x, torch.zeros_like(is_image))[0])
