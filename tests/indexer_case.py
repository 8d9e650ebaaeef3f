"""Two index sources over the same rows, driven through the modules and through plain loops."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_vllm.models.deepseek_v41.cache import PagedCache, compressed_spec
from deepinfer_vllm.models.deepseek_v41.indexer import Indexer
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable, inverse_frequencies
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.topology import layer_role
from reference.rope import rotate
from small_model import both_configs, fill, make_step, normal, scattered

BLOCK, BLOCKS = 8, 12
BATCH = [(0, 40), (30, 64), (70, 71), (0, 3), (95, 96), (0, 10), (0, 1)]
Rows = list[set[int]]


@dataclass
class Case:
    """The index source of layer 2, which may publish candidates, and that of layer 3, which may use them."""

    first: Indexer
    second: Indexer
    weights: list[dict[str, torch.Tensor]]
    rows: PagedCache
    keys: torch.Tensor  # [requests, rows, index_head_dim]
    table: torch.Tensor
    frequencies: torch.Tensor
    ratio: int
    topk: int
    blocks: int
    block_size: int

    def run(self, ranges: list[tuple[int, int]], requests: list[int]) -> tuple[Step, Rows, Rows]:
        """Both layers over a batch of (some of) the requests: what each selects, as sets."""
        step = make_step(ranges, {self.rows.name: self.table[requests]})
        owner, rotary = torch.tensor(requests)[step.request], RotaryTable(step.positions, self.frequencies)
        x, q_low = inputs(owner, step.positions)
        chosen = []
        for layer in (self.first, self.second):
            layer(x, q_low, rotary, self.rows, step)
            assert step.selected is not None
            for row in step.selected.tolist():
                kept = [g for g in row if g >= 0]
                assert kept == sorted(set(kept)) and row[len(kept) :] == [-1] * (len(row) - len(kept))
            chosen.append([{g for g in row if g >= 0} for row in step.selected.tolist()])
        return step, chosen[0], chosen[1]

    def expected(self, request: int, position: int) -> tuple[set[int], set[int], set[int]]:
        """(rows of the first layer, candidate blocks, rows of the second layer) of one token, by sorting."""
        visible, size = (position + 1) // self.ratio, self.block_size
        first, second = (self.scores(n, request, position) for n in (0, 1))
        blocks = sorted(
            range(-(-visible // size)),
            key=lambda b: (b != (visible - 1) // size, -max(first[b * size : (b + 1) * size])),
        )[: self.blocks]
        inside = [g for g in range(visible) if not self.first.role.publishes_candidates or g // size in blocks]
        return (
            set(sorted(range(visible), key=lambda g: -first[g])[: self.topk]),
            set(blocks),
            set(sorted(inside, key=lambda g: -second[g])[: self.topk]),
        )

    def scores(self, layer: int, request: int, position: int) -> list[float]:
        """Of every row that a token sees, in float64."""
        w, heads, dim = self.weights[layer], self.first.heads, self.first.dim
        x, q_low = (t[0].double() for t in inputs(torch.tensor([request]), torch.tensor([position])))
        query = (w["wq_b.weight"] @ q_low).view(1, heads, dim)
        query = rotate(query, torch.tensor([position]), self.frequencies.double())[0]
        head_weight = (w["weights_proj.weight"] @ x).tolist()
        products = (self.keys[request, : (position + 1) // self.ratio].double() @ query.T).tolist()
        return [
            sum(weight * max(0.0, product) for weight, product in zip(head_weight, row, strict=True))
            * (dim * heads) ** -0.5
            for row in products
        ]


def inputs(request: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same (x, q_low) for a token of a request, whatever batch it is in."""
    return normal(5, len(BATCH), 128, 32)[request, position], normal(6, len(BATCH), 128, 12)[request, position]


def make(ratio: int = 1, topk: int = 6, blocks: int = 3, size: int = 4, candidates: bool = True) -> Case:
    config, _ = both_configs(
        compress_ratios=(0, ratio, ratio, ratio, ratio),
        index_topk=topk,
        candidate_source_layer_id=2 if candidates else -1,
        candidate_topk_blocks=blocks,
        candidate_block_size=size,
    )
    layers = [Indexer(config, layer_role(config, n), Numerics(quantised=False), f"layer{n}") for n in (2, 3)]
    weights = [fill(layer, seed=n) for n, layer in enumerate(layers)]
    width = config.head_dim + config.index_head_dim
    rows = PagedCache("rows", compressed_spec(BLOCK, width, torch.float32, ratio), {})
    memory = torch.full((len(BATCH) * BLOCKS + 1, 1, rows.rows_per_block, width), torch.nan)
    rows.bind_kv_cache(memory)
    table, keys = scattered(len(BATCH), BLOCKS), normal(7, len(BATCH), 96 // ratio, config.index_head_dim)
    for request, (_, end) in enumerate(BATCH):
        index = torch.arange(end // ratio)
        latent = torch.zeros(len(index), config.head_dim)
        values = torch.cat((latent, keys[request, : len(index)]), dim=-1)
        rows.write(table, torch.full_like(index, request), index, values)
    frequencies = inverse_frequencies(config.compress_rope)
    return Case(*layers, weights, rows, keys, table, frequencies, ratio, topk, blocks, size)
