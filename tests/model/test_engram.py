"""Engram's gate against the reference, and where its table lies."""

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.engram import Engram
from deepinfer_vllm.models.deepseek_v41.engram_table import EngramTable
from reference.engram import engram as reference
from small_model import both_configs, fill, generator, normal

TOKENS, ROWS = 13, 300

pytestmark = pytest.mark.usefixtures("vllm_layers")


@pytest.mark.parametrize("eps", [1e-20, 1e-3])
@pytest.mark.parametrize("streams", [2, 4])
def test_as_the_reference(streams: int, eps: float) -> None:
    ours, theirs = both_configs(hc_mult=streams, rms_norm_eps=eps)
    assert ours.engram is not None
    module = Engram(ours, ours.engram, torch.float32, "engram")
    weights = fill(module, seed=1, prefix="layers.0.engram.")
    table = normal(2, ROWS, ours.engram.head_dim)
    module.table = EngramTable(table)
    weights["layers.0.engram.embed.weight"] = table.double()
    rows = torch.randint(ROWS, (TOKENS, ours.engram.num_columns), generator=generator(3))
    x = normal(4, TOKENS, streams, 32)
    x[1] *= 0.01
    x[3, 1] = -x[3, 0]
    expected = reference(x.double(), rows, 0, weights, theirs, torch.zeros(TOKENS, dtype=torch.bool))
    got = module(x, rows)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert float((got - x).abs().amax((1, 2)).min()) > 1e-2
    is_image = torch.arange(TOKENS) % 3 == 0
    masked = module(x, rows, is_image)
    assert torch.equal(masked[is_image], x[is_image]) and torch.equal(masked[~is_image], got[~is_image])
    assert torch.equal(reference(x.double(), rows, 0, weights, theirs, is_image)[is_image], x[is_image].double())


def test_a_sign_decides_on_which_side_of_a_half_the_gate_is() -> None:
    """One stream along its key, one against it."""
    ours, _ = both_configs(hc_mult=2)
    assert ours.engram is not None
    module = Engram(ours, ours.engram, torch.float32, "engram")
    weights = fill(module, seed=5)
    module.q_weight.data.fill_(1)
    module.k_weight.data.fill_(1)
    table = normal(6, ROWS, ours.engram.head_dim)
    module.table = EngramTable(table)
    rows = torch.arange(ours.engram.num_columns).unsqueeze(0)
    out = weights["wkv.weight"] @ table[rows].flatten().double()
    x = torch.stack((out[:32], -out[32:64])).float().unsqueeze(0)
    gates = ((module(x, rows) - x)[0].double() / out[64:]).median(-1).values
    exact = 1 / (1 + torch.exp(-torch.tensor([1.0, -1.0]).double() * 32**0.25))
    torch.testing.assert_close(gates, exact, rtol=1e-3, atol=1e-4)


def test_a_stream_of_zeros_has_a_gate_just_past_a_half() -> None:
    """As in vLLM's kernel: a dot product of 0 counts as positive, so the clamp decides."""
    ours, _ = both_configs(hc_mult=2)
    assert ours.engram is not None
    module = Engram(ours, ours.engram, torch.float32, "engram")
    weights = fill(module, seed=5)
    table = normal(6, ROWS, ours.engram.head_dim)
    module.table = EngramTable(table)
    rows = torch.arange(ours.engram.num_columns).unsqueeze(0)
    value = (weights["wkv.weight"] @ table[rows].flatten().double())[64:]
    gate = 1 / (1 + torch.tensor(-1e-3).double().exp())
    got = module(torch.zeros(1, 2, 32), rows)[0].double()
    torch.testing.assert_close(got, (gate * value).expand(2, -1), rtol=1e-5, atol=1e-6)


def test_streams_keep_their_dtype_and_the_table_its_own() -> None:
    ours, _ = both_configs()
    assert ours.engram is not None
    module = Engram(ours, ours.engram, torch.float32, "engram")
    fill(module, seed=7)
    table = normal(8, ROWS, ours.engram.head_dim).bfloat16()
    module.table = EngramTable(table)
    rows = torch.randint(ROWS, (TOKENS, ours.engram.num_columns), generator=generator(9))
    x = normal(10, TOKENS, 4, 32)
    got = module(x, rows)
    assert got.dtype == x.dtype
    module.table = EngramTable(table.float())
    assert torch.equal(got, module(x, rows))
