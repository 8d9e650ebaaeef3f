"""Top-k with a total order: higher score first, then lower index."""

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.topk import ascending, stable_topk
from small_model import generator

INF = float("inf")


def by_sorting(scores: torch.Tensor, k: int) -> list[set[int]]:
    return [set(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]) for row in scores.tolist()]


def as_sets(indices: torch.Tensor) -> list[set[int]]:
    return [set(row) for row in indices.tolist()]


@pytest.mark.parametrize("k", [0, 1, 5, 17, 40])
def test_values_of_every_kind(k: int) -> None:
    pool = torch.tensor([-INF, -3.5, -1e-40, -0.0, 0.0, 1e-40, 1e-3, 2.0, 3e38, INF])
    scores = pool[torch.randint(len(pool), (50, 40), generator=generator(1))]
    assert as_sets(stable_topk(scores, k)) == by_sorting(scores, k)


@pytest.mark.parametrize("k", [3, 32])
def test_distinct_scores(k: int) -> None:
    scores = torch.randn(20, 64, generator=generator(2))
    assert as_sets(stable_topk(scores, k)) == by_sorting(scores, k)


def test_scores_that_differ_in_the_last_bit() -> None:
    for value in (1.0, -1.0, 1e-40, -1e-40):
        around = torch.full((1, 9), value)
        for i in range(1, 9):
            around[0, i] = torch.nextafter(around[0, i - 1], torch.tensor(INF))
        for k in range(1, 9):
            assert as_sets(stable_topk(around, k)) == [set(range(9 - k, 9))]


def test_equal_scores_go_to_the_lower_index() -> None:
    for value in (0.0, -0.0, 1.5, -1.5, -INF):
        assert as_sets(stable_topk(torch.full((3, 300), value), 4)) == [{0, 1, 2, 3}] * 3


def test_zero_has_no_sign() -> None:
    assert as_sets(stable_topk(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 2)) == [{0, 1}]


def test_padding_and_batch_do_not_matter() -> None:
    scores = torch.randint(4, (30, 50), generator=generator(3)).float()
    alone = [as_sets(stable_topk(row.unsqueeze(0), 7))[0] for row in scores]
    padded = torch.nn.functional.pad(scores, (0, 1000), value=-INF)
    assert as_sets(stable_topk(scores, 7)) == alone == as_sets(stable_topk(padded, 7))


def test_ascending_puts_the_invalid_last() -> None:
    indices = torch.tensor([[5, 0, 3, 9], [1, 2, 3, 0], [4, 8, 6, 7]])
    valid = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
    assert ascending(indices, valid).tolist() == [[3, 5, 9, -1], [-1, -1, -1, -1], [4, 6, 7, 8]]


def test_fewer_in_order_are_the_first_of_more() -> None:
    """Ties and all, which `torch.topk` breaks by how many are asked for."""
    scores = (2 * torch.randn(40, 500, generator=torch.Generator().manual_seed(0))).round()
    most = stable_topk(scores, 500, in_order=True)
    assert torch.equal(most, scores.sort(dim=-1, descending=True, stable=True).indices)
    for k in (1, 2, 3, 20):
        assert torch.equal(stable_topk(scores, k, in_order=True), most[:, :k])
