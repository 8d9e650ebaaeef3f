"""What LMCache does with its second level, done through its own factory and interface, in its own environment.

Run by `tests/kvstore/test_lmcache_adapter.py` with the interpreter that `LMCACHE_PYTHON` names:
`python lmcache_round_trip.py ROOT PHASE`.
"""

import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform.event_notifier import consume_fd

SIZES = [70_000, 4096, 1, 65_536, 12_345, 70_000, 69_999, 8192]
SLAB_BYTES = 1 << 20


def adapter(root: Path, /, **more: Any) -> Any:
    """LMCache's adapter for the store at `root`, made as its storage manager makes it."""
    parameters = {
        "root": str(root), "object_bytes": 70_000, "capacity_bytes": 8 * SLAB_BYTES, "slab_bytes": SLAB_BYTES,
        "index_dir": str(root.parent / "index"), **more,
    }  # fmt: skip
    made = create_l2_adapter(
        PluginL2AdapterConfig.from_dict(
            {
                "module_path": "deepinfer_vllm.kv_connector.lmcache_adapter",
                "class_name": "StoreL2Adapter",
                "adapter_params": parameters,
            }
        )
    )
    made.set_backend_identity("plugin")
    return made


def name(number: int, **changes: Any) -> ObjectKey:
    fields = {"chunk_hash": number.to_bytes(4, "big"), "model_name": "org/model", "kv_rank": 7, **changes}
    return ObjectKey(**fields)


def content(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (SIZES[number],), dtype=torch.uint8, generator=generator)


def memory(data: torch.Tensor) -> TensorMemoryObj:
    """A memory object as LMCache's allocators make it."""
    metadata = MemoryObjMetadata(data.shape, data.dtype, 0, data.numel(), 1)
    return TensorMemoryObj(data, metadata, None)


def wait_for(fd: int, poll: Callable[[], Any]) -> Any:
    """What `poll` says once the adapter has signalled."""
    assert select.select([fd], [], [], 60)[0], "no signal"
    consume_fd(fd)
    return poll()


def store(level: Any, numbers: Sequence[int], **changes: Any) -> Any:
    task = level.submit_store_task([name(n, **changes) for n in numbers], [memory(content(n)) for n in numbers])
    results = wait_for(level.get_store_event_fd(), level.pop_completed_store_tasks)
    assert list(results) == [task]
    return results[task]


def lookup(level: Any, names: Sequence[ObjectKey]) -> list[bool]:
    task = level.submit_lookup_and_lock_task(list(names), {})
    found = wait_for(level.get_lookup_and_lock_event_fd(), lambda: level.query_lookup_and_lock_result(task))
    assert level.query_lookup_and_lock_result(task) is None, "told once"
    level.submit_unlock(list(names))
    return [found.test(number) for number in range(len(names))]


def load(level: Any, names: Sequence[ObjectKey], numbers: Sequence[int]) -> list[bool]:
    """Load, and compare every byte of those that it says are there."""
    items = [memory(torch.zeros(SIZES[n], dtype=torch.uint8)) for n in numbers]
    task = level.submit_load_task(list(names), items)
    loaded = wait_for(level.get_load_event_fd(), lambda: level.query_load_result(task))
    assert level.query_load_result(task) is None, "told once"
    for number, item in enumerate(items):
        if loaded.test(number):
            assert torch.equal(item.raw_data, content(numbers[number])), f"object {numbers[number]} has other bytes"
    return [loaded.test(number) for number in range(len(names))]


def first(root: Path) -> None:
    """Objects of several sizes; nothing of another model, rank, group or salt is found by their hashes."""
    level = adapter(root)
    numbers = range(8)
    assert len({level.get_store_event_fd(), level.get_lookup_and_lock_event_fd(), level.get_load_event_fd()}) == 3
    result = store(level, numbers)
    assert result.is_successful() and result.bytes_transferred() == sum(SIZES)
    assert store(level, numbers).bytes_transferred() == 0, "they are there already"
    assert lookup(level, [*map(name, numbers), name(99)]) == [True] * 8 + [False]
    assert load(level, [name(n) for n in numbers], numbers) == [True] * 8
    for changes in ({"model_name": "other"}, {"kv_rank": 8}, {"object_group_id": 1}, {"cache_salt": "tenant"}):
        assert lookup(level, [name(0, **changes)]) == [False]
    assert load(level, [name(0), name(99)], [0, 1]) == [True, False]
    assert load(level, [name(0)], [1]) == [False], "an object of another length is a miss"
    assert store(level, [0, 1], cache_salt="tenant").is_successful()
    level.delete([name(1)])
    level._store.sync()
    assert lookup(level, [name(0), name(1), name(1, cache_salt="tenant")]) == [True, False, True]
    assert level.get_usage().usage_fraction == -1.0, "LMCache leaves it to the store to evict"
    assert level.report_status()["is_healthy"]
    assert level.submit_store_task([], []) and wait_for(level.get_store_event_fd(), level.pop_completed_store_tasks)
    level.close()


def second(root: Path) -> None:
    """After a restart; and a damaged object is not loaded."""
    level = adapter(root)
    numbers = [0, 2, 3, 4, 5, 6, 7]
    assert load(level, [name(n) for n in numbers], numbers) == [True] * 7
    level.close()
    (slab,) = root.glob("*/slabs/*.slab")
    with slab.open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    level = adapter(root)
    assert load(level, [name(n) for n in numbers], numbers) == [False, *[True] * 6]
    other = adapter(root.parent / "root", namespace="fp8")
    assert lookup(other, [name(2)]) == [False]
    other.close()
    level.close()


def coded(root: Path) -> None:
    """Over six directories, two of which go."""
    roots = [root.parent / f"disk{number}" for number in range(6)]
    more = {"ec": "4+2", "roots": [str(each) for each in roots]}
    for each in roots:
        each.mkdir()
    level = adapter(roots[0], **more)
    assert store(level, range(8)).is_successful()
    level.close()
    for number in (1, 4):
        os.rename(roots[number], root.parent / f"gone{number}")
    level = adapter(roots[0], **more)
    assert load(level, [name(n) for n in range(8)], range(8)) == [True] * 8
    level.close()


def mistakes(root: Path) -> None:
    """Bad parameters are one error with its reason."""
    for changes, says in (
        ({"root": ""}, "root is ''"),
        ({"object_bytes": "many"}, "object_bytes is 'many'"),
        ({"colour": "red"}, "'colour' is unknown"),
        ({"root": "/no/such/place"}, "is not a directory"),
        ({"capacity_bytes": 5}, "capacity_bytes is 5"),
        ({"namespace": 5}, "namespace is 5"),
    ):
        try:
            adapter(root, **changes)
        except ValueError as error:
            assert says in str(error), error
        else:
            raise AssertionError(f"{changes} was taken")


if __name__ == "__main__":
    {"first": first, "second": second, "coded": coded, "mistakes": mistakes}[sys.argv[2]](Path(sys.argv[1]))
    print("done")
