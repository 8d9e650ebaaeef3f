"""CHECK servers for tests, in a thread of this process, over stores of a few prompts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from deepinfer_kvstore.chain import ChainHasher, none_hash
from deepinfer_kvstore.daemon import Daemon, DaemonOptions
from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.extra_keys import NOTHING_EXTRA, ExtraKeys
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.serving_thread import ServingThread
from deepinfer_kvstore.store import Put, Store
from store_case import descriptor, options

UNIT = 16
PAYLOAD = 100
ROOT = none_hash("0")
HASHER = ChainHasher(UNIT, ROOT)


def namespace(**changes: Any) -> Descriptor:
    return descriptor(
        PAYLOAD, none_hash=ROOT.hex(), hash_tokens=UNIT, **{"groups": (Group(1, UNIT, PAYLOAD),), **changes}
    )


def keys_of(tokens: Sequence[int], extra: ExtraKeys = NOTHING_EXTRA, schema: int = 1) -> list[Key]:
    return [make_key(schema, block_hash) for block_hash in HASHER.hashes(tokens, extra)]


@contextmanager
def storing(tmp_path: Path, what: Descriptor | None = None, **changes: Any) -> Iterator[Store]:
    """A store of `tmp_path`'s root, or of `roots`, whose index is where the daemons of this file have theirs."""
    roots = changes.get("roots", [tmp_path / "root"])
    for root in roots:
        root.mkdir(exist_ok=True)
    store = Store.open(roots[0], what or namespace(), options(tmp_path, 64, **changes))
    try:
        yield store
    finally:
        store.close()


def store_prompt(store: Store, tokens: Sequence[int], extra: ExtraKeys = NOTHING_EXTRA, schema: int = 1) -> None:
    """Put every block of a prompt."""
    parent, puts = bytes(8), []
    for number, key in enumerate(keys_of(tokens, extra, schema)):
        puts.append(Put(key, memoryview(bytes(PAYLOAD)), parent, UNIT * (number + 1)))
        parent = key[2:10]
    transfer = store.put(puts)
    assert transfer.wait(30) and all(transfer.results())
    store.sync()


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "it did not come about"
        sleep(0.01)


@contextmanager
def daemon(tmp_path: Path, **changes: Any) -> Iterator[Daemon]:
    """A daemon over `tmp_path`'s root, its socket at `tmp_path / "check.sock"`."""
    (tmp_path / "root").mkdir(exist_ok=True)
    given = {"root": tmp_path / "root", "index_dir": tmp_path / "index", "socket": tmp_path / "check.sock"}
    with ServingThread(DaemonOptions(**{"sync_seconds": 0.02, **given, **changes})) as serving:
        yield serving.daemon
