"""Compressed rows: pooled, keyed and rotated as the reference does, wherever a request is cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.compressor import Compressor, Float32Linear
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable, inverse_frequencies
from deepinfer_vllm.models.deepseek_v41.windows import Windows
from reference.compressor import compress, row_positions
from reference.rope import rotate
from small_model import bind, both_configs, fill, make_step, normal, scattered

BLOCK, BLOCKS, LENGTH, EPS = 4, 6, 21, 1e-6

pytestmark = pytest.mark.usefixtures("vllm_layers")


@dataclass
class Case:
    module: Compressor
    frequencies: torch.Tensor
    expected: torch.Tensor  # [requests, rows, head_dim + index_head_dim] float64
    x: torch.Tensor  # [requests, LENGTH, hidden]
    ratio: int

    def run(self, batches: list[list[tuple[int, int]]]) -> torch.Tensor:
        """Rows after steps in which request i computes batch[i]; everything not written is NaN."""
        table = scattered(len(self.x), BLOCKS)
        caches = [self.module.rows] if self.ratio == 1 else [self.module.rows, self.module.open_group]
        for cache in caches:
            bind(cache, len(self.x) * BLOCKS + 1, torch.nan)
        for batch in batches:
            step = make_step(batch, {cache.name: table for cache in caches})
            self.module(self.x[step.request, step.positions], step, self.frequencies, key)
        rows = torch.arange(LENGTH // self.ratio)
        return self.module.rows.read(table, torch.arange(len(self.x)).unsqueeze(-1), rows)


def key(latent: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
    """An index key that shows which latent and which position it was asked for."""
    return torch.cat((latent[:, :8], rotary.cos[:, 0:4:2], rotary.sin[:, 1:5:2]), dim=-1)


def make(ratio: int, requests: int = 1) -> Case:
    config, _ = both_configs()
    module = Compressor(
        config, ratio, Numerics(quantised=False), BLOCK, torch.float32, {}, "c", Windows.plan(config, 0)
    )
    weights = fill(module, seed=ratio, prefix="c.")
    frequencies, x = inverse_frequencies(config.compress_rope), normal(1, requests, LENGTH, 32)
    expected = []
    for request in x.double():
        latent = compress(request, weights, "c", ratio, EPS)
        positions = row_positions(len(latent), ratio)
        angles = positions.double().unsqueeze(-1) * frequencies.double()
        keys = torch.cat((latent[:, :8], angles.cos()[:, :2], angles.sin()[:, :2]), dim=-1)
        expected.append(torch.cat((rotate(latent, positions, frequencies.double()), keys), dim=-1))
    return Case(module, frequencies, torch.stack(expected), x, ratio)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got.double(), expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("cut", range(1, LENGTH))
@pytest.mark.parametrize("ratio", [1, 2])
def test_cut_anywhere(ratio: int, cut: int) -> None:
    case = make(ratio)
    assert close(case.run([[(0, cut)], [(cut, LENGTH)]]), case.expected)


@pytest.mark.parametrize("ratio", [1, 2])
def test_whole_and_token_by_token(ratio: int) -> None:
    case = make(ratio)
    whole, single = case.run([[(0, LENGTH)]]), case.run([[(t, t + 1)] for t in range(LENGTH)])
    assert close(whole, case.expected) and close(single, case.expected)


@pytest.mark.parametrize("ratio", [1, 2])
def test_requests_at_different_places(ratio: int) -> None:
    """One is prefilled, one goes token by token, one has no tokens in some steps; groups end in some of them."""
    case = make(ratio, requests=3)
    single = [(t, t + 1) for t in range(15, LENGTH)]
    batches = [[(0, 11), (0, 15), (0, 0)], *([(11, 11), one, (0, 0)] for one in single), [(11, 21), (21, 21), (0, 21)]]
    assert close(case.run(batches), case.expected)


def test_an_open_group_writes_no_row() -> None:
    case = make(2)
    rows = case.run([[(0, 7)]])[0]
    assert close(rows[:3], case.expected[0, :3]) and bool(rows[3:].isnan().all())


def test_no_kernel_runs_on_no_rows() -> None:
    """vLLM's CUDA kernel for RMSNorm cannot, and leaves its error to whatever runs next."""
    case = make(2)
    counts: list[int] = []
    case.module.norm.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    case.run([[(0, 1)], [(1, 2)], [(2, 3)]])
    assert counts == [1]


def test_each_channel_is_gated_by_itself() -> None:
    """Pooling by hand, so that the reference is not believed alone."""
    case = make(2)
    weights = {name: p.data.double() for name, p in case.module.named_parameters()}
    one, two = case.x[0, 4].double(), case.x[0, 5].double()
    pooled = []
    for c in range(16):
        a, b = (float(weights["wgate.weight"][c] @ v) for v in (one, two))
        share = 1 / (1 + torch.tensor(b - a).double().exp())
        pooled.append(share * (weights["wkv.weight"][c] @ one) + (1 - share) * (weights["wkv.weight"][c] @ two))
    latent = torch.stack(pooled)
    latent = latent * torch.rsqrt(latent.square().mean() + EPS) * weights["norm.weight"]
    got = case.run([[(0, LENGTH)]])[0, 2]
    assert close(got[:8], latent[:8]) and close(got[16:24], latent[:8])  # the channels that are not rotated


def test_projections_of_pairs_are_float32() -> None:
    linear = Float32Linear(32, 16)
    fill(linear, seed=9)
    x = normal(9, 4, 32).bfloat16()
    got = linear(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ linear.weight.double().T, rtol=1e-5, atol=1e-6)
