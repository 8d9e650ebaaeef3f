"""Row selection against loops over tokens and rows: how many, in which blocks, and in any batch or chunk."""

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41 import indexer as module
from indexer_case import BATCH, Case, make
from small_model import normal

pytestmark = pytest.mark.usefixtures("vllm_layers")


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"ratio": 2},
        {"topk": 1, "blocks": 1, "size": 1},
        {"topk": 20, "blocks": 2, "size": 3},  # more rows wanted than the candidate blocks hold
        {"topk": 500},  # every row, inside the candidate blocks
        {"topk": 500, "blocks": 100},
        {"blocks": 100},  # candidates that never bite
        {"ratio": 2, "topk": 5, "candidates": False},
        {"topk": 2, "blocks": 2, "size": 50},
    ],
    ids=str,
)
def test_a_batch_selects_what_loops_select(case: dict[str, int]) -> None:
    made = make(**case)
    requests = list(range(len(BATCH)))
    step, first, second = made.run(BATCH, requests)
    for t, (request, position) in enumerate(zip(step.request.tolist(), step.positions.tolist(), strict=True)):
        rows, blocks, narrowed = made.expected(request, position)
        assert first[t] == rows, (request, position)
        assert second[t] == narrowed, (request, position)
        if made.first.role.publishes_candidates:
            assert step.candidates is not None
            kept = {b for b in step.candidates[t].tolist() if b >= 0}
            assert kept == blocks or (not kept and len(blocks) * made.block_size >= (position + 1) // made.ratio)
        else:
            assert step.candidates is None


@pytest.mark.parametrize("workspace", [1, 4 * 16 * 40 * 7])
@pytest.mark.parametrize("ratio", [1, 2])
def test_chunks_of_scores_do_not_matter(ratio: int, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, requests = make(ratio), list(range(len(BATCH)))
    whole, first, second = made.run(BATCH, requests)
    monkeypatch.setattr(module, "WORKSPACE_BYTES", workspace)
    chunked, *selected = made.run(BATCH, requests)
    assert selected == [first, second]
    assert whole.candidates is not None and chunked.candidates is not None
    assert torch.equal(whole.candidates, chunked.candidates)


def test_the_batch_and_its_cuts_do_not_matter() -> None:
    """Each request alone, and cut where its topk and its blocks begin to bite."""
    made, at = make(), 0
    _, first, second = made.run(BATCH, list(range(len(BATCH))))
    for request, (start, end) in enumerate(BATCH):
        cuts = sorted({start, *(c for c in (5, 6, 7, 11, 12, 13, 33) if start < c < end), end})
        parts = [made.run([(low, high)], [request])[1:] for low, high in zip(cuts, cuts[1:], strict=False)]
        assert [rows for part in parts for rows in part[0]] == first[at : at + end - start]
        assert [rows for part in parts for rows in part[1]] == second[at : at + end - start]
        at += end - start


@pytest.mark.parametrize("block_bytes", [0, 4 * 3 * 2 * 34 * 64, 1 << 30])  # each alone, some, all
@pytest.mark.parametrize("ratio", [1, 2])
def test_who_is_scored_together_does_not_matter(ratio: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, requests = make(ratio), list(range(len(BATCH)))
    usual, first, second = made.run(BATCH, requests)
    monkeypatch.setattr(module, "KEY_BLOCK_BYTES", block_bytes)
    step, *selected = made.run(BATCH, requests)
    assert selected == [first, second]
    assert step.candidates is not None and usual.candidates is not None
    assert torch.equal(step.candidates, usual.candidates)


def test_the_newest_block_is_pinned() -> None:
    made = make(blocks=2)
    step, _, _ = made.run([(0, 40)], [0])
    assert step.candidates is not None
    pinned = [int(p) // 4 in row.tolist() for p, row in zip(step.positions, step.candidates, strict=True)]
    assert all(pinned[8:])
    unpinned = [by_score(made, position) for position in range(8, 40)]
    assert not all((position // 4) in blocks for position, blocks in zip(range(8, 40), unpinned, strict=True))


def by_score(made: Case, position: int) -> set[int]:
    """The best two blocks when none is pinned."""
    scores = made.scores(0, 0, position)
    return set(sorted(range(position // 4 + 1), key=lambda b: -max(scores[b * 4 : b * 4 + 4]))[:2])


@pytest.mark.parametrize(("tokens", "rows"), [(5, 37), (1, 1), (3, 0), (0, 4)])
@pytest.mark.parametrize("block_bytes", [1, 500, 4 << 20])
def test_head_sums(tokens: int, rows: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of keys against one array of all heads, tokens and rows."""
    monkeypatch.setattr(module, "KEY_BLOCK_BYTES", block_bytes)
    query, weight, keys = normal(1, tokens, 3, 8), normal(2, tokens, 3), normal(3, rows, 8)
    whole = torch.einsum("thd,gd->thg", query.double(), keys.double()).relu_()
    expected = torch.einsum("th,thg->tg", weight.double(), whole)
    torch.testing.assert_close(module.head_sum(query, weight, keys).double(), expected, rtol=1e-5, atol=1e-5)
