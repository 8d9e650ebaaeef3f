"""Host regions: none outlives its engine, and nobody else's is touched. vllm#57303"""

import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from deepinfer_vllm.kv_connector import shared_region
from deepinfer_vllm.kv_connector.shared_region import (
    OURS,
    PREFIX,
    SHM,
    close_region,
    hold_region,
    remove_dead_regions,
    unlink_region,
)


@pytest.fixture
def names() -> Iterator[list[Path]]:
    """Paths of regions that the test makes, removed after it."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def stale(path: Path) -> Path:
    path.write_bytes(b"x")
    os.utime(path, (1, 1))
    return path


def test_only_regions_of_ours_that_nobody_holds_are_removed(names: list[Path]) -> None:
    token = uuid.uuid4().hex
    dead, part, held, young, stock = names[:] = [
        SHM / f"{PREFIX}{OURS}{token}.mmap",
        SHM / f"{PREFIX}{OURS}{token}.mmap.1",
        SHM / f"{PREFIX}{OURS}{token}-held.mmap",
        SHM / f"{PREFIX}{OURS}{token}-young.mmap",
        SHM / f"{PREFIX}{token}.mmap",
    ]
    for path in names:
        stale(path)
    os.utime(young)
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        removed = remove_dead_regions()
    assert {dead, part} <= set(removed) and not {held, young, stock} & set(removed)
    assert [path.exists() for path in names] == [False, False, True, True, True]


def test_a_mapped_region_is_held_until_it_is_closed(names: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_region, "_STARTING_SECONDS", -1.0)
    engine_id = OURS + uuid.uuid4().hex
    rank = SharedOffloadRegion(engine_id, 2, 0, 4096, 4096)
    names.append(path := Path(rank.mmap_path))
    hold_region(rank)
    assert path not in remove_dead_regions()
    scheduler = SharedOffloadRegion(engine_id, 2, None, 4096, 4096)
    hold_region(scheduler)
    unlink_region(scheduler)
    assert not path.exists()
    rank.create_next_worker_view(4096)[1] = 7
    view = scheduler.create_kv_memoryview()
    assert view[1, 9] == 7
    view.release()
    for region in (rank, scheduler):
        close_region(region)


def test_closing_removes_a_region_that_was_never_unlinked(names: list[Path]) -> None:
    region = SharedOffloadRegion(OURS + uuid.uuid4().hex, 1, 0, 4096, 4096)
    names.append(path := Path(region.mmap_path))
    hold_region(region)
    close_region(region)
    assert not path.exists()
