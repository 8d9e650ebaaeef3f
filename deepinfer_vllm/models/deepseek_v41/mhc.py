"""Delayed manifold-constrained hyper-connections: several residual streams, mixed before and after each sublayer.

One projection of the flattened streams S [T, M, D] yields `pre` [T, M] (the weights with which the *next* sublayer
collapses the streams), `post` [T, M] (where a sublayer's output goes) and `comb` [T, M, M] (how streams mix), the last
made nearly doubly stochastic by Sinkhorn rounds. Everything here is float32; streams are kept in the model's dtype.
"""

import torch
from torch import nn

from deepinfer_vllm.native import invariance, invariant
from deepinfer_vllm.native.build import kernels
from deepinfer_vllm.native.linear import linear
from deepinfer_vllm.triton_kernels.choice import chosen

Gates = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""pre [T, M], post [T, M], comb [T, M, M], float32."""


class HyperConnection(nn.Module):
    """The mixing weights of one sublayer. In checkpoints `hc_attn.fn` is `hc_attn_fn`, and so on."""

    def __init__(self, streams: int, hidden_size: int, iterations: int, eps: float, norm_eps: float) -> None:
        super().__init__()
        outputs = (2 + streams) * streams
        self.streams, self.iterations, self.eps, self.norm_eps = streams, iterations, eps, norm_eps
        self.fn = nn.Parameter(torch.empty(outputs, streams * hidden_size, dtype=torch.float32), requires_grad=False)
        self.base = nn.Parameter(torch.empty(outputs, dtype=torch.float32), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32), requires_grad=False)
        self.fused = chosen()

    def forward(self, streams: torch.Tensor) -> Gates:
        """Of streams [T, M, D]."""
        if self.fused and not invariance.by_rows():
            return self._fused(streams)
        return gates(streams, self.fn, self.base, self.scale, self.iterations, self.eps, self.norm_eps)

    def delayed(self, streams: torch.Tensor, pre: torch.Tensor) -> tuple[torch.Tensor, *Gates]:
        """(streams [T, M, D] collapsed by the `pre` [T, M] of the sublayer before, this one's pre, post, comb)."""
        if self.fused and not invariance.by_rows():
            return collapse(streams, pre), *self._fused(streams)
        return delayed(streams, pre, self.fn, self.base, self.scale, self.iterations, self.eps, self.norm_eps)

    def _fused(self, streams: torch.Tensor) -> Gates:
        from deepinfer_vllm.triton_kernels.gates import gates as fused

        flat = streams.flatten(1).float()
        norm, mixes = torch.linalg.vector_norm(flat, dim=-1, keepdim=True), linear(flat, self.fn)
        sizes = {"streams": self.streams, "width": flat.shape[-1], "iterations": self.iterations}
        return fused(mixes, norm, self.base, self.scale, **sizes, eps=self.eps, norm_eps=self.norm_eps)


def gates(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Gates:
    """Of streams [T, M, D] by fn [(2 + M) * M, M * D], base [(2 + M) * M] and scale [3], float32."""
    m = streams.shape[1]
    flat = streams.flatten(1).float()
    if invariance.by_rows():
        pre, post, comb = invariant.hyper_gates(flat, fn, base, scale, m, eps, norm_eps)
        return pre, post, sinkhorn(comb, iterations, eps)
    norm = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
    return mixed(linear(flat, fn), norm, base, scale, m, flat.shape[-1], iterations, eps, norm_eps)


def mixed(
    mixes: torch.Tensor,
    norm: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    m: int,
    width: int,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Gates:
    """`gates` from the projection [T, (2 + M) * M] and the norms [T, 1] of flattened streams of so many channels."""
    mixes = mixes * torch.rsqrt(norm.square() / width + norm_eps)  # fewer values to scale
    pre, post, comb = mixes.split((m, m, m * m), dim=-1)
    base_pre, base_post, base_comb = base.split((m, m, m * m))
    pre = torch.sigmoid(pre * scale[0] + base_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    comb = (comb * scale[2] + base_comb).view(-1, m, m)
    return pre, post, sinkhorn(comb, iterations, eps)


def delayed(
    streams: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, *Gates]:
    """(`collapse` by the `pre` of the sublayer before, `gates` of this one): both read the streams, so that a device's
    kernel may read them once."""
    return collapse(streams, pre), *gates(streams, fn, base, scale, iterations, eps, norm_eps)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """logits [T, M, M] float32 to row softmax, then columns and rows normalised in turn, columns last.

    A hundred operations on a few numbers: on a CPU compiled where that is possible.
    """
    library = kernels() if logits.is_cpu else None
    if library is None:
        return sinkhorn_in_torch(logits, iterations, eps)
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    library.sinkhorn(logits.data_ptr(), out.data_ptr(), logits.shape[0], logits.shape[-1], iterations, eps)
    return out


def sinkhorn_in_torch(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """The same on any device."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def begin(embeds: torch.Tensor, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(streams [T, M, D], all the embeddings [T, D]; pre [T, M] float32, which takes the first) before any layer."""
    pre = torch.zeros(len(embeds), streams, dtype=torch.float32, device=embeds.device)
    pre[:, 0] = 1.0
    return embeds.unsqueeze(1).expand(-1, streams, -1).contiguous(), pre


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams [T, M, D] -> [T, D], rounded to their dtype."""
    if invariance.by_rows():
        return invariant.collapse(streams, pre).to(streams.dtype)
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """out[j] = post[j] * y + sum_i comb[i, j] * streams[i]; y [T, D], streams and out [T, M, D]."""
    if invariance.by_rows():
        return invariant.expand(y, streams, post, comb).to(streams.dtype)
    out = post.unsqueeze(-1) * y.float().unsqueeze(1)
    return out.baddbmm_(comb.transpose(1, 2), streams.float()).to(streams.dtype)
