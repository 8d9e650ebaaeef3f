"""What `benchmarks/kvstore_check.py` measures: hashing a prompt beside vLLM's own, and CHECK against a daemon."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer_kvstore.chain import ChainHasher, none_hash
from deepinfer_kvstore.client import CheckClient
from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.opening import prepare
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.questions import Question
from deepinfer_kvstore.record import Op, Record

VOCABULARY = 129_280
"""V4.1's."""
TURN_TOKENS = 1024
"""By which a conversation grows."""
LOOKUPS = 1024
PAYLOAD_BYTES = 116_928
SEED = "0"
ROOT_HASH = none_hash(SEED)
READING_SECONDS = 600
_BATCH = 4096


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids."""
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def hash_times(tokens: list[int], block: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of hashing a prompt, from a list of ids: vLLM's request, ours in Python, ours in C; in turns."""
    os.environ["PYTHONHASHSEED"] = SEED
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256_cbor)
    hasher = kv_cache_utils.get_request_block_hasher(block, sha256_cbor)
    request = Request("r", tokens, SamplingParams(max_tokens=1), None)
    ours = {name: ChainHasher(block, ROOT_HASH, compiled=name == "compiled") for name in ("python", "compiled")}
    ways: dict[str, Callable[[], list[Any]]] = {
        "vllm": lambda: hasher(request),
        **{name: lambda chain=chain: chain.hashes(tokens) for name, chain in ours.items()},
    }
    expected = ways["vllm"]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(timed(way))
    if any(way() != expected for way in ways.values()):
        raise RuntimeError("the hashes differ from vLLM's")
    return times


class Store:
    """A namespace whose journals say that prompts, and blocks of nobody, are stored. There is no slab."""

    def __init__(self, root: Path, block: int, prompts: list[list[int]], keys: int) -> None:
        self.root, self.block = root, block
        groups = (Group(0, block, PAYLOAD_BYTES),)
        self.descriptor = Descriptor(
            f"bench-{block}", "w", "fp8", "r", "l", "sha256_cbor", ROOT_HASH.hex(), block, "all", groups
        )
        places, _ = prepare(root, self.descriptor, StoreOptions(read_only=False, capacity_bytes=1 << 30))
        hasher = ChainHasher(block, ROOT_HASH)
        self.keys: list[Key] = [make_key(0, found) for tokens in prompts for found in hasher.hashes(tokens)]
        rng = random.Random(block)
        self.keys += [make_key(0, rng.randbytes(32)) for _ in range(keys - len(self.keys))]
        journal = JournalWriter(places.journals, 1, 1, self.descriptor.digest())
        for start in range(0, len(self.keys), _BATCH):
            journal.append([_put(number + start, key) for number, key in enumerate(self.keys[start : start + _BATCH])])
        journal.close()


def _put(number: int, key: Key) -> Record:
    location = Location(1, number >> 13, number & 0x1FFF, number + 1)
    return Record(Op.PUT, key, Entry(location, PAYLOAD_BYTES, bytes(8), 0, 1, 1, 1, 0))


@contextmanager
def daemon(root: Path, directory: Path, keys: int) -> Iterator[tuple[Path, int]]:
    """A daemon in a process of its own, once it knows `keys` blocks: its socket and its process id."""
    socket, metrics = directory / "check.sock", directory / "metrics"
    command = [sys.executable, __file__, str(root), str(directory / "index"), str(socket), str(metrics)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        deadline = time.monotonic() + READING_SECONDS
        while not (metrics.exists() and _known(metrics) >= keys):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon has not read {keys} keys (exit code {process.poll()})")
            time.sleep(0.2)
        yield socket, process.pid
    finally:
        process.terminate()
        process.wait()


def _known(metrics: Path) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{json.loads(metrics.read_text())}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("deepinfer_kvstore_keys{"))


def check_times(socket: Path, store: Store, tokens: list[int], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a CHECK of a stored prompt, from a list of ids to the answer: hashed in Python, in C, and as one
    more turn of a conversation; in turns."""
    name = store.descriptor.directory
    clients = {way: CheckClient(socket, budget_seconds=10, compiled=way != "python") for way in ("python", "compiled")}
    turns = CheckClient(socket, budget_seconds=10)
    times: dict[str, list[float]] = {"python": [], "compiled": [], "turn": []}
    expected = len(tokens) // store.block * store.block

    def ask(client: CheckClient, question: Question) -> None:
        if client.check(question).hit_tokens != expected:
            raise RuntimeError(f"CHECK of {len(tokens)} stored tokens found fewer")

    for number in range(-1, rounds):  # the first connects, and counts for nothing
        for way, client in clients.items():
            spent = timed(lambda client=client: ask(client, Question(name, tokens)))
            times[way] += [spent] if number >= 0 else []
        chat = str(number)
        turns.check(Question(name, tokens[:-TURN_TOKENS], conversation=chat))
        spent = timed(lambda chat=chat: ask(turns, Question(name, tokens, conversation=chat)))
        times["turn"] += [spent] if number >= 0 else []
    for client in (*clients.values(), turns):
        if client.failures:
            raise RuntimeError(f"questions were not answered: {client.failures}")
        client.close()
    return times


def lookup_times(index_dir: Path, store: Store, rounds: int) -> list[float]:
    """Milliseconds of looking up `LOOKUPS` random keys of the index."""
    path = index_dir / store.descriptor.directory
    index = Index.open(path, store.descriptor.digest(), root=str(store.root.resolve()))
    rng, times = random.Random(1), []
    for _ in range(rounds):
        wanted = rng.sample(store.keys, LOOKUPS)
        times.append(timed(lambda wanted=wanted: index.get_many(wanted)))
        if None in index.get_many(wanted):
            raise RuntimeError("a stored key was not found")
    index.close()
    return times


def anonymous_bytes(process: int) -> int:
    """Memory of a process that is no file's."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


def _serve(root: str, index_dir: str, socket: str, metrics: str) -> None:
    from deepinfer_kvstore.daemon import DaemonOptions, serve

    options = DaemonOptions(
        Path(root), ("check", "index"), index_dir=Path(index_dir), socket=Path(socket), metrics=("127.0.0.1", 0)
    )

    def started(daemon: Any) -> None:
        written = Path(metrics).with_suffix(".new")
        written.write_text(json.dumps(daemon.metrics_port))
        written.rename(metrics)

    serve(options, started)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
