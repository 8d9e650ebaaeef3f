"""Attention of a request's consecutive tokens against the same rows gathered token by token."""

from __future__ import annotations

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41 import span_attention as module
from deepinfer_vllm.models.deepseek_v41.gather_attention import gather_attention
from deepinfer_vllm.models.deepseek_v41.span_attention import Compressed, span_attention
from small_model import generator, normal

HEADS, DIM = 3, 8
SCALE = DIM**-0.5


def selection(start: int, tokens: int, ratio: int, k: int) -> torch.Tensor:
    """[T, K]: up to k of the visible rows, ascending; every third token has one fewer than it could."""
    out = torch.full((tokens, k), -1)
    for t in range(tokens):
        visible = (start + t + 1) // ratio
        count = min(k, visible) - (1 if visible > k and t % 3 == 0 else 0)
        chosen = torch.randperm(visible, generator=generator(t))[:count].sort().values
        out[t, : len(chosen)] = chosen
    return out


def both(
    start: int, tokens: int, window: int, floor: int = 0, ratio: int = 0, k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(fast, slow) results. Rows that do not exist yet are NaN."""
    query, sink = normal(1, tokens, HEADS, DIM), normal(2, HEADS)
    end, low = start + tokens, max(floor, start - window + 1, 0)
    latents = normal(3, end, DIM)
    index = torch.arange(start, end).unsqueeze(-1) - torch.arange(window)
    valid = index >= low
    rows = latents[torch.where(valid, index, torch.arange(start, end).unsqueeze(-1))]
    compressed = None
    if ratio:
        written = torch.cat((normal(4, end // ratio, DIM), torch.full((3, DIM), torch.nan)))
        selected = selection(start, tokens, ratio, k)
        compressed = Compressed(selected, ratio, lambda row: written[row])
        mine = written[selected.clamp_min(0)].masked_fill((selected < 0).unsqueeze(-1), 0)
        rows, valid = torch.cat((rows, mine), dim=1), torch.cat((valid, selected >= 0), dim=1)
    fast = span_attention(query, start, latents[low:], window, compressed, sink, SCALE)
    return fast, gather_attention(query, rows, valid, sink, SCALE)


def assert_same(fast: torch.Tensor, slow: torch.Tensor) -> None:
    assert fast.dtype == torch.float32 and fast.shape == slow.shape and bool(slow.isfinite().all())
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 7, 50, 200])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 33), (5, 70), (150, 1), (150, 64)])
def test_windows(start: int, tokens: int, window: int) -> None:
    """Longer and shorter than the span, the block and the context."""
    assert_same(*both(start, tokens, window))


@pytest.mark.parametrize("floor", [37, 40, 41])
def test_a_floor_hides_rows(floor: int) -> None:
    assert_same(*both(41, 70, 9, floor))
    assert not torch.allclose(both(41, 70, 9, floor)[0][0], both(41, 70, 9)[0][0])


@pytest.mark.parametrize("dense_factor", [0, 2, 1000])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("start", "tokens", "k"), [(0, 1, 0), (0, 45, 6), (40, 70, 6), (300, 40, 20), (300, 1, 400)])
def test_compressed_rows(
    start: int, tokens: int, k: int, ratio: int, dense_factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiplied all, or gathered, or both in one span."""
    monkeypatch.setattr(module, "DENSE_FACTOR", dense_factor)
    assert_same(*both(start, tokens, 7, ratio=ratio, k=min(k, (start + tokens) // ratio)))


def test_the_block_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = both(100, 70, 9, ratio=2, k=12)[1]
    for block in (1, 5, 64, 1000):
        monkeypatch.setattr(module, "BLOCK_TOKENS", block)
        assert_same(both(100, 70, 9, ratio=2, k=12)[0], expected)


def test_less_precision_is_widened_first() -> None:
    query, rows, sink = normal(1, 20, HEADS, DIM).bfloat16(), normal(2, 20, DIM).bfloat16(), normal(3, HEADS)
    got = span_attention(query, 0, rows, 8, None, sink, SCALE)
    assert torch.equal(got, span_attention(query.float(), 0, rows.float(), 8, None, sink, SCALE))


def test_no_tokens() -> None:
    nothing = torch.zeros(0, HEADS, DIM)
    assert span_attention(nothing, 5, torch.zeros(0, DIM), 8, None, torch.zeros(HEADS), SCALE).shape == nothing.shape
