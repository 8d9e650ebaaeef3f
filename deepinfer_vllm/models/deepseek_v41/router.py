"""The router: which `k` experts take a token, and with what weight.

Selection adds a bias to the scores that the weights do not see ("noaux_tc", DeepSeek-V3 technical report, 2.1.2).
"""

import torch
from torch import nn

from deepinfer_vllm.models.deepseek_v41.compressor import Float32Linear
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.native import invariance, invariant


class Router(Float32Linear):
    """Scores the experts. Image tokens have a bias of their own, `bias_vl`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts)
        self.k, self.temperature = config.num_experts_per_token, config.gate_temp
        self.normalise, self.scaling = config.norm_topk_prob, config.routed_scaling_factor
        self.scoring = config.scoring_func
        if config.has_gate_bias:
            self.bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)
            self.bias_vl = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)
        else:
            self.bias = None

    def route(self, x: torch.Tensor, is_image: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] to (experts [T, k] int64, best first; weights [T, k] float32).

        is_image [T] bool: which tokens are an image's; None: none.
        """
        scores = self._score(self(x) / self.temperature)
        ranked = scores
        if self.bias is not None:
            text = self.bias
            ranked = scores + (text if is_image is None else torch.where(is_image.unsqueeze(-1), self.bias_vl, text))
        experts = torch.topk(ranked, self.k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalise and self.k > 1:
            weights = weights / (_row_sums(weights) + 1e-20)
        return experts, weights * self.scaling

    def _score(self, logits: torch.Tensor) -> torch.Tensor:
        if invariance.by_rows():
            ways = {"sqrtsoftplus": invariant.sqrt_softplus, "sigmoid": invariant.sigmoid}
            return ways.get(self.scoring, invariant.softmax)(logits)
        if self.scoring == "sqrtsoftplus":
            return nn.functional.softplus(logits).sqrt()
        return torch.sigmoid(logits) if self.scoring == "sigmoid" else torch.softmax(logits, dim=-1)


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """[T, k] to [T, 1]."""
    if invariance.by_rows():
        return invariant.dots(x, torch.ones_like(x)).unsqueeze(-1)
    return x.sum(dim=-1, keepdim=True)
