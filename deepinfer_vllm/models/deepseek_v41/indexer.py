"""The indexer of an index source: which compressed rows each token attends to.

score(p, g) = sum over heads h of w_h * relu(q_h . k_g) / sqrt(index_head_dim * heads), for the rows g that p can see:
g < (p + 1) // ratio. The `index_topk` best are selected; where fewer are visible, all of them.

Two levels: the candidate source also ranks blocks of `candidate_block_size` rows by their best score and publishes the
`candidate_topk_blocks` best, the newest block always among them; later index sources choose inside those blocks only.
"""

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from deepinfer_vllm.models.deepseek_v41.candidate_mask import mask_scores
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.norm import RMSNorm
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable, rotate
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.topk import ascending, stable_topk
from deepinfer_vllm.models.deepseek_v41.topology import LayerRole
from deepinfer_vllm.models.deepseek_v41.weight_storage import WeightStorage
from deepinfer_vllm.native import invariance, invariant

WORKSPACE_BYTES = 64 << 20
"""Scores of one chunk of tokens with what ranking them takes; bounds memory, not the result."""

CHUNK_TOKENS = 64
"""Most tokens of a chunk: enough for a wide product."""

KEY_BLOCK_BYTES = 4 << 20
"""One chunk's products with a block of keys, all heads: they stay in a cache until they are summed over the heads. Also
those of several requests that are scored together: beyond, each has enough work of its own."""

Part: TypeAlias = "slice | torch.Tensor"
"""Tokens of a step."""

Asked = tuple[int, int, int]
"""A request and the range of its tokens that see more rows than are selected."""


class Indexer(nn.Module):
    """Queries of one index source; a KV source also owns the keys' projection."""

    def __init__(
        self,
        config: ModelConfig,
        role: LayerRole,
        numerics: Numerics,
        prefix: str,
        storage: WeightStorage | None = None,
    ) -> None:
        super().__init__()
        self.role, self.numerics = role, numerics
        self.heads, self.dim, self.topk = config.index_heads, config.index_head_dim, config.index_topk
        self.blocks, self.block_size = config.candidate_blocks, config.candidate_block_size
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank,
            self.heads * self.dim,
            bias=False,
            return_bias=False,
            quant_config=storage,
            prefix=f"{prefix}.wq_b",
        )
        self.weights_proj = ReplicatedLinear(
            config.hidden_size, self.heads, bias=False, return_bias=False, prefix=f"{prefix}.weights_proj"
        )
        if role.writes_rows:
            self.wk = ReplicatedLinear(config.head_dim, self.dim, bias=False, return_bias=False, prefix=f"{prefix}.wk")
            self.k_norm = RMSNorm(self.dim, config.norm_eps)

    def key(self, latent: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
        """Index keys [n, dim] of unrotated latents [n, head_dim]."""
        return self.numerics.index(rotate(self.k_norm(self.wk(latent)), rotary))

    def forward(self, x: torch.Tensor, q_low: torch.Tensor, rotary: RotaryTable, rows: PagedCache, step: Step) -> None:
        """Set `step.selected`, and `step.candidates` where this layer publishes them.

        x [T, hidden], q_low [T, q_lora_rank]; `rows` holds latents [head_dim] then keys [dim].
        """
        ratio = self.role.ratio
        visible = (step.positions + 1) // ratio
        most = max(step.seq_lens) // ratio
        k = min(self.topk, most)
        every = torch.arange(k, device=visible.device).expand(step.num_tokens, k)
        step.selected = every.masked_fill(every >= visible.unsqueeze(-1), -1)
        reach = self.blocks * self.block_size
        if self.role.publishes_candidates:
            shape = (step.num_tokens, self.blocks if most > reach else 0)
            step.candidates = torch.full(shape, -1, device=visible.device)
        two_level = self.role.publishes_candidates or self.role.uses_candidates
        unscored = min(self.topk, reach) if two_level else self.topk  # up to so many rows, all visible are selected
        if most <= unscored:
            return
        query = self.numerics.index(rotate(self.wq_b(q_low).view(-1, self.heads, self.dim), rotary))
        weight = self.weights_proj(x).float() * (self.dim * self.heads) ** -0.5
        asked = list[Asked]()
        for request, (start, end) in enumerate(step.spans):
            first_position = step.seq_lens[request] - (end - start)
            begin = start + max(0, (unscored + 1) * ratio - 1 - first_position)
            if begin < end:
                asked.append((request, begin, end))
        for group in self._groups(asked, step):
            if len(group) == 1:
                self._score_request(*group[0], query, weight, visible, rows, step)
            else:
                self._score_together(group, query, weight, visible, rows, step)

    def _groups(self, asked: list[Asked], step: Step) -> Iterator[list[Asked]]:
        """Requests to score together: as many as have their products within KEY_BLOCK_BYTES, all as large as the
        largest."""
        group, tokens, num_rows = list[Asked](), 0, 0
        for request, begin, end in asked:
            wider = max(tokens, end - begin), max(num_rows, step.seq_lens[request] // self.role.ratio)
            if group and 4 * self.heads * (len(group) + 1) * wider[0] * wider[1] > KEY_BLOCK_BYTES:
                yield group
                group, wider = [], (end - begin, step.seq_lens[request] // self.role.ratio)
            group.append((request, begin, end))
            tokens, num_rows = wider
        if group:
            yield group

    def _score_together(
        self,
        group: list[Asked],
        query: torch.Tensor,
        weight: torch.Tensor,
        visible: torch.Tensor,
        rows: PagedCache,
        step: Step,
    ) -> None:
        """Select for all tokens of some requests at once; short requests repeat their last token and their last row."""
        request, begin, end = torch.tensor(group, device=visible.device).unsqueeze(-1).unbind(1)
        there = torch.tensor([step.seq_lens[r] // self.role.ratio for r, _, _ in group], device=visible.device)
        index = torch.arange(int(there.max()), device=visible.device)
        first = rows.kv_cache.shape[-1] - self.dim
        row = index.minimum(there.unsqueeze(-1) - 1)
        keys = rows.read(step.tables[rows.name], request, row, first=first).float()
        place = begin + torch.arange(max(e - b for _, b, e in group), device=visible.device)
        tokens = place.minimum(end - 1)
        own = (place < end).flatten()
        if invariance.by_rows():
            flat = tokens.flatten()[own]
            owner = torch.arange(len(group)).repeat_interleave(place.shape[1])[own]
            self._choose(invariant.head_scores(query[flat], weight[flat], keys, owner), flat, visible, step)
            return
        products = torch.bmm(query[tokens].float().flatten(1, 2), keys.transpose(1, 2)).relu_()
        products = products.view(-1, self.heads, len(index))
        scores = torch.bmm(weight[tokens].view(-1, 1, self.heads), products).squeeze(1)
        self._choose(scores[own], tokens.flatten()[own], visible, step)

    def _score_request(
        self,
        request: int,
        begin: int,
        end: int,
        query: torch.Tensor,
        weight: torch.Tensor,
        visible: torch.Tensor,
        rows: PagedCache,
        step: Step,
    ) -> None:
        """Select for tokens begin..end of one request, a chunk at a time."""
        num_rows = step.seq_lens[request] // self.role.ratio
        index = torch.arange(num_rows, device=visible.device)
        owner = torch.full_like(index, request)
        keys = rows.read(step.tables[rows.name], owner, index, first=rows.kv_cache.shape[-1] - self.dim).float()
        chunk = max(1, min(CHUNK_TOKENS, WORKSPACE_BYTES // (32 * num_rows)))
        last = step.spans[request][1]
        for low in range(begin, end, chunk):
            part = slice(low, min(low + chunk, end))
            seen = (step.seq_lens[request] - (last - part.stop)) // self.role.ratio  # by the chunk's last token
            self._choose(head_sum(query[part].float(), weight[part], keys[:seen]), part, visible, step)

    def _choose(self, scores: torch.Tensor, part: Part, visible: torch.Tensor, step: Step) -> None:
        """Set `step.selected` and `step.candidates` of some tokens by their scores [t, rows], which are used up."""
        assert step.selected is not None
        seen = scores.shape[-1]
        narrowed = step.candidates[part] if self.role.uses_candidates and step.candidates is not None else None
        mask_scores(scores, visible[part], narrowed, self.block_size)
        if self.role.publishes_candidates:
            self._publish(scores, visible[part], part, step)
        k = min(step.selected.shape[1], seen)
        best = stable_topk(scores, k)
        step.selected[part, :k] = ascending(best, scores.gather(-1, best) > float("-inf"))

    def _publish(self, scores: torch.Tensor, visible: torch.Tensor, part: Part, step: Step) -> None:
        """Keep the best blocks of the tokens that see more blocks than are kept."""
        assert step.candidates is not None
        num_blocks = -(-scores.shape[-1] // self.block_size)
        if num_blocks <= self.blocks:
            return
        padded = nn.functional.pad(scores, (0, num_blocks * self.block_size - scores.shape[-1]), value=float("-inf"))
        best = padded.unflatten(-1, (num_blocks, self.block_size)).amax(dim=-1)
        newest = (visible - 1) // self.block_size
        best.scatter_(-1, newest.unsqueeze(-1), float("inf"))
        kept = stable_topk(best, self.blocks)
        ranked = ascending(kept, best.gather(-1, kept) > float("-inf"))
        step.candidates[part] = ranked.masked_fill_((newest < self.blocks).unsqueeze(-1), -1)


def head_sum(query: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """sum over h of weight[t, h] * relu(query[t, h] . keys[g]), float32.

    query [t, H, D], weight [t, H], keys [G, D] to [t, G].
    """
    if invariance.by_rows():
        return invariant.head_scores(query, weight, keys.unsqueeze(0), torch.zeros(len(query), dtype=torch.int64))
    tokens, heads, dim = query.shape
    block = max(1, KEY_BLOCK_BYTES // (4 * max(1, tokens) * heads))
    out = query.new_empty(tokens, keys.shape[0])
    flat = query.reshape(tokens * heads, dim)
    for low in range(0, keys.shape[0], block):
        part = keys[low : low + block]
        products = torch.mm(flat, part.T).relu_().view(tokens, heads, part.shape[0])
        out[:, low : low + block] = torch.bmm(weight.unsqueeze(1), products).squeeze(1)
    return out
