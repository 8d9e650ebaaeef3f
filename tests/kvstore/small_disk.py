"""A small file system of one's own: run in a mount namespace of its own, `python small_disk.py CASE DIRECTORY`."""

import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.store import Store
from store_case import SLAB_SLOTS, descriptor, get, key, open_store, options, payload, put

DISK_BYTES = 1 << 20


def mount(directory: Path, option: str = "") -> None:
    """A disk of `DISK_BYTES` in `directory`, or the one that is there with another option."""
    options = ["-o", f"remount,{option}"] if option else ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs"]
    subprocess.run(["mount", *options, str(directory)], check=True)


def fill(directory: Path) -> Path:
    """A file that takes what is free in `directory`."""
    path = directory / "others"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert "No space left on device" in str(error)
    assert os.statvfs(directory).f_bavail == 0
    return path


def until_stored(store: Store, number: int) -> None:
    """Put until it is taken, as engines do with each prompt."""
    deadline = monotonic() + 30
    while put(store, [number]) != [True]:
        assert monotonic() < deadline
        sleep(0.02)


def full_root(directory: Path) -> None:
    """Loads go on and stores are dropped while others fill the disk; stores go on when there is room."""
    (directory / "root").mkdir()
    mount(directory / "root")
    store = open_store(directory)
    stored = range(SLAB_SLOTS)  # the next one needs a slab
    assert put(store, stored) == [True] * SLAB_SLOTS
    others = fill(directory / "root")
    assert put(store, range(100, 140)) == [False] * 40
    assert get(store, stored) == [payload(number) for number in stored]
    store.touch([key(1)])
    dropped = store.stats().dropped
    assert sum(dropped.values()) == 40 and set(dropped) <= {"full", "error"}, dropped
    try:
        Store.open(directory / "root", descriptor(model="other"), options(directory))
    except StoreConfigError as error:
        assert "No space left on device" in str(error) or "bytes free" in str(error), error
    else:
        raise AssertionError("a full disk was opened")
    others.unlink()
    until_stored(store, 200)
    store.close()
    again = open_store(directory, index_dir=directory / "another-index")  # what the journals say
    assert get(again, [*stored, 200, 100]) == [*(payload(number) for number in stored), payload(200), None]
    again.close()


def read_only_root(directory: Path) -> None:
    """An error at start for who would write; readers read."""
    (directory / "root").mkdir()
    mount(directory / "root")
    store = open_store(directory)
    assert put(store, range(4)) == [True] * 4
    store.close()
    mount(directory / "root", "ro")
    try:
        open_store(directory)
    except StoreConfigError as error:
        assert "Read-only file system" in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError("a read-only disk was opened for writing")
    reader = open_store(directory, read_only=True)
    assert get(reader, range(5)) == [*(payload(number) for number in range(4)), None]
    assert put(reader, [9]) == [False] and reader.stats().dropped == {"read_only": 1}
    reader.close()


def full_index(directory: Path) -> None:
    """Nothing dies for an index without room; what it could not learn is a miss until there is room."""
    (directory / "index").mkdir()
    mount(directory / "index")
    store = open_store(directory, slabs=64)
    assert put(store, range(4)) == [True] * 4
    others = fill(directory / "index")
    for number in range(1000, 1000 + 40 * SLAB_SLOTS, SLAB_SLOTS):
        put(store, range(number, number + SLAB_SLOTS))
    found = get(store, [0, *range(1000, 1000 + 40 * SLAB_SLOTS)])
    assert all(block in (None, payload(number)) for number, block in zip([0, *range(1000, 1640)], found, strict=True))
    others.unlink()
    until_stored(store, 5000)
    assert get(store, [5000]) == [payload(5000)]
    store.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
    print("seen")
