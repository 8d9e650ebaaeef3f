"""Several ranks in one process: a thread each, with groups that stand in for vLLM's and exchange real tensors.

What a process start costs, a test of the sharding need not pay; tests/engine/test_parallel.py runs the real groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed

T = TypeVar("T")
WAIT_SECONDS = 60


class Ranks:
    """`tp * dp` ranks, tensor-parallel ranks adjacent. `run` and `of` say which one the calling thread is.

    One runs at a time, until it has to wait for another: vLLM's matrix products on CPU share a scratch memory.
    """

    def __init__(self, tp: int, dp: int) -> None:
        self.count, self.tp, self.dp = tp * dp, tp, dp
        self._local = threading.local()
        self.turn = threading.Lock()

    @property
    def rank(self) -> int:
        return int(self._local.rank)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        self._local.rank = rank
        yield

    def run(self, work: Callable[[int], T]) -> list[T]:
        """`work(rank)` of every rank at once; their results in order."""

        def task(rank: int) -> T:
            with self.turn, self.of(rank), torch.inference_mode():
                return work(rank)

        with ThreadPoolExecutor(self.count) as pool:
            return [future.result(WAIT_SECONDS) for future in [pool.submit(task, r) for r in range(self.count)]]


class Group:
    """vLLM's GroupCoordinator as the model uses it, over those ranks that `color` gives one number."""

    def __init__(self, ranks: Ranks, size: int, index: Callable[[int], int], color: Callable[[int], int]) -> None:
        self._ranks, self._index, self._color = ranks, index, color
        self.world_size, self.cpu_group = size, self
        self._barriers = [threading.Barrier(size, timeout=WAIT_SECONDS) for _ in range(ranks.count)]
        self._slots: list[list[Any]] = [[None] * size for _ in range(ranks.count)]

    @property
    def rank_in_group(self) -> int:
        return self._index(self._ranks.rank)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        color = self._color(self._ranks.rank)
        self._slots[color][self.rank_in_group] = value
        self._wait(color)
        values = list(self._slots[color])
        self._wait(color)
        return values

    def _wait(self, color: int) -> None:
        self._ranks.turn.release()
        try:
            self._barriers[color].wait()
        finally:
            self._ranks.turn.acquire()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        return torch.stack(self.exchange(tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.exchange(tensor), dim)

    def all_gatherv(self, tensors: Sequence[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
        found = [torch.cat(self.exchange(tensor), dim) for tensor in tensors]
        assert [len(tensor) for tensor in tensors] == [sizes[self.rank_in_group]] * len(tensors)
        assert {len(tensor) for tensor in found} == {sum(sizes)}
        return found

    def reduce_scatterv(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        return self.all_reduce(tensor).split(sizes, dim)[self.rank_in_group]


def start(monkeypatch: pytest.MonkeyPatch, tp: int = 1, dp: int = 1) -> Ranks:
    """Put groups of these sizes where vLLM keeps its own."""
    from vllm.distributed import parallel_state

    ranks = Ranks(tp, dp)
    monkeypatch.setattr(parallel_state, "_TP", Group(ranks, tp, lambda r: r % tp, lambda r: r // tp))
    monkeypatch.setattr(parallel_state, "_DP", Group(ranks, dp, lambda r: r // tp, lambda r: r % tp))
    original = torch.distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if isinstance(group, Group):
            return tensor.copy_(group.all_reduce(tensor.clone()))
        return original(tensor, *args, group=group, **kwargs)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return ranks
