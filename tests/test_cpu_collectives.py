"""Gather and reduce-scatter of unequal parts, over real gloo groups of several processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

RANKS = 3
SIZES = ([2, 0, 5], [1, 1, 1], [0, 0, 4], [7, 3, 2])


def rows(rank: int, count: int) -> Any:
    """Whole numbers: their sums are exact in any order."""
    import torch

    return torch.randint(-9, 9, (count, 4), generator=torch.Generator().manual_seed(rank)).float()


def work(rank: int, rendezvous: str, errors: Any) -> None:
    try:
        _work(rank, rendezvous)
        errors.put("")
    except BaseException as error:
        errors.put(f"rank {rank}: {error!r}")
        raise


def _work(rank: int, rendezvous: str) -> None:
    import torch
    import torch.distributed

    from deepinfer_vllm.compat.cpu_collectives import _all_gatherv, _reduce_scatterv

    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    communicator = SimpleNamespace(world_size=RANKS, rank_in_group=rank, device_group=torch.distributed.group.WORLD)
    for sizes in SIZES:
        own = rows(rank, sizes[rank])
        found, twice = _all_gatherv(communicator, [own, 2 * own.long()], 0, sizes)
        want = torch.cat([rows(r, sizes[r]) for r in range(RANKS)])
        assert torch.equal(found, want) and torch.equal(twice, 2 * want.long())

        total = sum(rows(r, sum(sizes)) for r in range(RANKS))
        found = _reduce_scatterv(communicator, rows(rank, sum(sizes)), 0, sizes)
        assert torch.equal(found, total.split(sizes)[rank])
    assert torch.equal(_all_gatherv(communicator, rows(rank, 2)), torch.cat([rows(r, 2) for r in range(RANKS)]))
    for wrong in (
        lambda: _all_gatherv(communicator, rows(rank, 9), 0, [1, 1, 1]),
        lambda: _all_gatherv(communicator, rows(rank, 1), 1, [1, 1, 1]),
        lambda: _reduce_scatterv(communicator, rows(rank, 4), 0, [1, 1, 1]),
    ):
        with pytest.raises(ValueError):
            wrong()
    torch.distributed.destroy_process_group()


def test_over_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    errors = context.SimpleQueue()
    arguments = (f"file://{tmp_path / 'rendezvous'}", errors)
    processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * RANKS
    assert [errors.get() for _ in processes] == [""] * RANKS


def test_vllm_gets_them_once_and_only_where_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from deepinfer_vllm import compat

    for name in ("all_gatherv", "reduce_scatterv"):
        if name in vars(CpuCommunicator):
            monkeypatch.delattr(CpuCommunicator, name)
    kept = object()
    monkeypatch.setattr(CpuCommunicator, "all_gatherv", kept, raising=False)
    compat.add_cpu_collectives()
    added = CpuCommunicator.reduce_scatterv
    compat.add_cpu_collectives()
    assert CpuCommunicator.all_gatherv is kept
    assert CpuCommunicator.reduce_scatterv is added is not DeviceCommunicatorBase.reduce_scatterv
