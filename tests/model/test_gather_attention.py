"""Attention over gathered rows against a loop over tokens and heads."""

import math

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41 import gather_attention as module
from deepinfer_vllm.models.deepseek_v41.gather_attention import gather_attention, located_attention, tokens_per_chunk
from small_model import generator, normal

TOKENS, HEADS, ROWS, DIM = 9, 3, 11, 8


def loop(
    query: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    out = torch.zeros(query.shape, dtype=torch.float64)
    for t in range(query.shape[0]):
        for h in range(query.shape[1]):
            seen = [n for n in range(rows.shape[1]) if valid[t, n]]
            logits = [float(query[t, h].double() @ rows[t, n].double()) * scale for n in seen]
            most = max([*logits, float(sink[h])])
            total = sum(math.exp(v - most) for v in [*logits, float(sink[h])])
            for n, logit in zip(seen, logits, strict=True):
                out[t, h] += math.exp(logit - most) / total * rows[t, n].double()
    return out


def case(seed: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    query, rows = normal(seed, TOKENS, HEADS, DIM) * size, normal(seed + 1, TOKENS, ROWS, DIM) * size
    valid = torch.rand(TOKENS, ROWS, generator=generator(seed)) < 0.6
    valid[0] = False
    valid[1] = True
    return query, rows, valid, normal(seed + 2, HEADS)


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_each_token_over_its_own_rows(size: float) -> None:
    query, rows, valid, sink = case(1, size)
    got = gather_attention(query, rows, valid, sink, DIM**-0.5)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), loop(query, rows, valid, sink, DIM**-0.5), rtol=1e-4, atol=1e-5 * size)


def test_no_valid_row_gives_zero() -> None:
    """All weight goes to the sink, which carries no value."""
    query, rows, valid, sink = case(2)
    assert torch.equal(gather_attention(query, rows, valid, sink, 0.3)[0], torch.zeros(HEADS, DIM))
    nothing = gather_attention(query, rows[:, :0], valid[:, :0], sink, 0.3)
    assert torch.equal(nothing, torch.zeros(TOKENS, HEADS, DIM))


@pytest.mark.parametrize("value", [80.0, -80.0])
def test_sink_takes_weight_and_carries_none(value: float) -> None:
    query, rows, valid, _ = case(3)
    got = gather_attention(query, rows, valid, torch.full((HEADS,), value), 1.0)
    if value > 0:
        assert float(got.abs().max()) < 1e-20
    else:
        masked = (query @ rows.transpose(1, 2)).masked_fill(~valid.unsqueeze(1), -torch.inf)[1:]
        torch.testing.assert_close(got[1:], torch.softmax(masked, -1) @ rows[1:], rtol=1e-4, atol=1e-6)


def test_rows_that_do_not_count_may_hold_anything_finite() -> None:
    query, rows, valid, sink = case(4)
    other = torch.where(valid.unsqueeze(-1), rows, 1e30)
    assert torch.equal(
        gather_attention(query, rows, valid, sink, 0.3), gather_attention(query, other, valid, sink, 0.3)
    )


def test_less_precision_is_widened_first() -> None:
    query, rows, valid, sink = case(5)
    query, rows = query.bfloat16(), rows.bfloat16()
    got = gather_attention(query, rows, valid, sink, 0.3)
    assert torch.equal(got, gather_attention(query.float(), rows.float(), valid, sink, 0.3))


def test_cached_rows_are_read_and_then_gathered_over() -> None:
    """Of two caches with rows of other widths between them; slots that no token reads hold NaN."""
    query, _, _, sink = case(6)
    pools = [normal(seed, 20, DIM + more)[:, :DIM] for seed, more in ((7, 0), (8, 3))]
    slots = [torch.randint(-1, 18, (TOKENS, n), generator=generator(n)) for n in (4, 7)]
    slots[0][3], slots[1][3] = -1, -1
    for pool in pools:
        pool[18:] = torch.nan
        pool[0] = torch.nan
    slots = [index.masked_fill(index == 0, -1) for index in slots]
    rows = torch.cat([pool[index.clamp_min(1)] for pool, index in zip(pools, slots, strict=True)], dim=1)
    valid = torch.cat(slots, dim=1) >= 0
    window, selected = zip(pools, slots, strict=True)
    got = located_attention(query, window, selected, sink, 0.3)
    assert torch.equal(got, gather_attention(query, rows, valid, sink, 0.3))
    assert torch.equal(got[3], torch.zeros(HEADS, DIM))
    alone = located_attention(query, window, None, sink, 0.3)
    assert torch.equal(alone, gather_attention(query, rows[:, :4], valid[:, :4], sink, 0.3))


def test_chunks_fit_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_rows, heads, dim in ((640, 64, 512), (1, 1, 1), (16, 4, 8)):
        tokens = tokens_per_chunk(num_rows, heads, dim)
        assert tokens >= 1 and tokens * num_rows * dim * 4 <= module.WORKSPACE_BYTES
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 1)
    assert tokens_per_chunk(640, 64, 512) == 1
