"""A plain llama over the store: what one engine has computed, the next one loads, and no failure changes an answer."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_kvstore.posix import PosixSlab
from deepinfer_kvstore.transfer import Transfer
from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.kv_connector import connector
from engine.harness import preempt_all_every, preemptions
from engine.kvstore import ask, engine_on, finish_stores, forget, slabs, tier_of
from engine.llama import write_llama

BLOCK = 32


def prompt(tokens: int, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 500) for _ in range(tokens)]


LONG, OTHER = prompt(300), prompt(200, seed=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama."""
    return write_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def filled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """A root where a process that was killed has stored LONG and OTHER; what it answered."""
    root = tmp_path_factory.mktemp("kv") / "root"
    root.mkdir()
    # PYTHONHASHSEED is absent in both processes, yet Python's own hashes differ (LMCache#1139).
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "engine.test_kvstore_llama", str(checkpoint), str(root)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ) as process:
        assert process.stdout is not None
        answers = next(line for line in process.stdout if line.startswith("stored "))
        process.send_signal(signal.SIGKILL)
    one, other = ([int(token) for token in part.split()] for part in answers.removeprefix("stored ").split(";"))
    return root, one, other


def store_and_hang(checkpoint: str, root: str) -> None:
    """The process to kill: it has stored both prompts, and is computing another."""
    with engine_on(Path(checkpoint), Path(root)) as backend:
        answers = [ask(backend, each)[0] for each in (LONG, OTHER)]
        finish_stores(backend)
        print("stored", ";".join(" ".join(map(str, answer)) for answer in answers), flush=True)
        ask(backend, prompt(100, seed=2), 800)


@pytest.fixture
def backend(checkpoint: Path, filled: tuple[Path, list[int], list[int]]) -> Iterator[EngineBackend]:
    """A fresh engine on the filled root."""
    with engine_on(checkpoint, filled[0]) as engine:
        yield engine


def test_another_engine_loads_what_a_killed_one_has_stored(
    backend: EngineBackend, filled: tuple[Path, list[int], list[int]]
) -> None:
    """vllm#52735: stored and never read; LMCache#2273: gone after a restart; LMCache#2136: 0 % between processes."""
    root, one, other = filled
    assert ask(backend, LONG) == (one, 288)
    assert ask(backend, OTHER) == (other, 192)
    # an answer is a part of the conversation's next prompt: 300 + 16 tokens were in the cache, 9 whole blocks of them
    turn = LONG + one + prompt(30, seed=5)
    answer, cached = ask(backend, turn)
    assert cached == 288
    finish_stores(backend)
    forget(backend)
    assert ask(backend, turn) == (answer, (len(turn) - 1) // BLOCK * BLOCK)
    # local-inference-lab/vllm#217: rows that nobody wrote
    payload = tier_of(backend)._payload_bytes
    for slab in slabs(root):
        memory = np.memmap(slab, dtype=np.uint8, mode="r")
        slots = memory[: len(memory) // (payload + 4096) * (payload + 4096)].reshape(-1, payload + 4096)
        written = slots[slots[:, payload:].any(1)]
        assert written[:, :payload].any(1).all()


def test_a_longer_answer_is_stored_block_by_block(backend: EngineBackend) -> None:
    start = prompt(60, seed=11)
    answer, cached = ask(backend, start, 100)
    assert cached == 0
    forget(backend)
    _, cached = ask(backend, start + answer, 4)
    assert cached == 128  # of 160, of which the last token's rows were never written


def test_chunks_batches_and_preemption_change_no_answer(
    checkpoint: Path, filled: tuple[Path, list[int], list[int]]
) -> None:
    root, one, other = filled
    with engine_on(checkpoint, root, max_num_batched_tokens=48, max_num_seqs=4) as backend:
        preempted = preemptions(backend)
        preempt_all_every(backend, 4)
        fresh = prompt(310, seed=21)
        answers = [a.ids for a in backend.generate_many([LONG, fresh, OTHER, LONG[:150]], 16, logits=False)]
        assert answers[0] == one and answers[2] == other and len(preempted) > 4
        finish_stores(backend)
        assert tier_of(backend)._store.stats().hits > 0
    with engine_on(checkpoint, root) as backend:
        again, cached = ask(backend, fresh)
        assert again == answers[1] and cached == 288
        assert ask(backend, LONG[:150])[0] == answers[3]


def test_salts_keep_to_themselves(backend: EngineBackend, filled: tuple[Path, list[int], list[int]]) -> None:
    """lmdeploy#4930"""
    salted: Any = {"prompt_token_ids": LONG, "cache_salt": "a tenant"}
    assert backend.cached_tokens(salted) == 0
    forget(backend)
    assert backend.cached_tokens(salted) == 288
    assert backend.cached_tokens({**salted, "cache_salt": "another"}) == 0
    assert ask(backend, LONG) == (filled[1], 288)


def test_another_dtype_finds_nothing(checkpoint: Path, filled: tuple[Path, list[int], list[int]]) -> None:
    """sglang#33268"""
    with engine_on(checkpoint, filled[0], dtype="bfloat16") as backend:
        assert ask(backend, LONG)[1] == 0
    assert len(list(filled[0].glob("*/meta.json"))) == 2


def test_a_corrupt_block_is_computed(checkpoint: Path, tmp_path: Path) -> None:
    """vllm#49176: the engine asked for a block again and again; Mooncake#4153: it would have used it."""
    with engine_on(checkpoint, tmp_path / "root") as backend:
        answer, _ = ask(backend, LONG)
        finish_stores(backend)
        whole = tier_of(backend)._store.stats().stores
        slot = tier_of(backend)._payload_bytes + 4096
        for slab in slabs(tmp_path / "root"):
            with slab.open("r+b") as file:
                for number in (4, 7):
                    file.seek(number * slot + 100)
                    file.write(b"flipped")
        forget(backend)
        assert ask(backend, LONG) == (answer, 4 * BLOCK)
        stats = tier_of(backend)._store.stats()
        assert stats.misses == {"checksum": 2} and stats.hits == whole - 2
        forget(backend)
        assert ask(backend, LONG) == (answer, 288)  # it was stored again


def test_a_store_that_breaks_is_a_store_without_hits(checkpoint: Path, tmp_path: Path) -> None:
    """Its directory is renamed away while the engine runs, as an unmounted disk would be."""
    root = tmp_path / "root"
    with engine_on(checkpoint, root) as backend:
        answer, _ = ask(backend, LONG)
        forget(backend)
        for directory in root.glob("*/*"):
            if directory.is_dir():
                directory.rename(directory.with_name(f"gone-{directory.name}"))
        assert ask(backend, LONG)[0] == answer
        forget(backend)
        assert ask(backend, LONG)[0] == answer
        assert ask(backend, OTHER, 8)[1] == 0
        finish_stores(backend)


def test_io_errors_are_misses(
    checkpoint: Path, filled: tuple[Path, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm-d-kv-cache#514"""

    def broken(*_: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")  # a mount that went away; EIO may be a lost block

    with engine_on(checkpoint, filled[0]) as backend:
        monkeypatch.setattr(PosixSlab, "read_fd", None)  # or C would read past what breaks here
        monkeypatch.setattr(PosixSlab, "readv", broken)
        monkeypatch.setattr(PosixSlab, "writev", broken)
        assert ask(backend, LONG) == (filled[1], 0)
        assert ask(backend, prompt(150, seed=31), 8)[1] == 0
        finish_stores(backend)
        monkeypatch.undo()
    with engine_on(checkpoint, filled[0]) as backend:
        assert ask(backend, LONG) == (filled[1], 288)


def test_a_disk_that_hangs_holds_nobody_up(
    checkpoint: Path, filled: tuple[Path, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is computed once the deadline has passed; rows that the disk may still write go to nobody."""
    hangs, answers = threading.Event(), threading.Event()
    read = PosixSlab.readv

    def hung(*arguments: Any) -> None:
        hangs.set()
        answers.wait()
        read(*arguments)

    monkeypatch.setattr(PosixSlab, "read_fd", None)
    monkeypatch.setattr(PosixSlab, "readv", hung)
    # The deadline passes when the disk hangs: a read that begins later than that is a miss like any.
    monkeypatch.setattr(Transfer, "overdue", lambda transfer: hangs.is_set() and not transfer.done())
    with engine_on(checkpoint, filled[0], extra={"io_timeout_s": 60.0}) as backend:
        try:
            assert ask(backend, LONG) == (filled[1], 0)
            captive = set(tier_of(backend).captive)
            assert len(captive) == 9
            assert ask(backend, OTHER)[0] == filled[2]
        finally:
            answers.set()
        finish_stores(backend)
        assert not tier_of(backend).captive


def test_a_step_that_runs_nothing_gives_the_interpreter_away(
    backend: EngineBackend, filled: tuple[Path, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the store's threads wait for it until the deadline of what they are to read, and a hit is a miss."""
    scheduled: list[int] = []
    pauses: list[float] = []
    plan = backend.scheduler.connector.build_connector_meta

    def planned(output: Any) -> Any:
        scheduled.append(output.total_num_scheduled_tokens)
        return plan(output)

    def paused(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(backend.scheduler.connector, "build_connector_meta", planned)
    monkeypatch.setattr(connector, "sleep", paused)
    assert ask(backend, LONG) == (filled[1], 288)
    assert len(pauses) == scheduled.count(0) > 0
    assert len(scheduled) - len(pauses) == 16  # a step a token


def test_stores_cost_decoding_no_step(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#26305: tokens came later while blocks were stored. Here all of an answer is there before one block is."""
    scheduled: list[int] = []
    hangs, goes_on = threading.Event(), threading.Event()
    write = PosixSlab.writev

    def hung(*arguments: Any) -> None:
        hangs.set()
        goes_on.wait(120)
        write(*arguments)

    with engine_on(checkpoint, tmp_path / "root", extra={"io_timeout_s": 300.0}) as backend:
        plan = backend.scheduler.connector.build_connector_meta

        def planned(output: Any) -> Any:
            scheduled.append(output.total_num_scheduled_tokens)
            return plan(output)

        def no_pause(seconds: float) -> None:
            raise AssertionError(f"a step waited {seconds} s")

        monkeypatch.setattr(backend.scheduler.connector, "build_connector_meta", planned)
        monkeypatch.setattr(PosixSlab, "writev", hung)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(connector, "sleep", no_pause)
                answer, _ = ask(backend, LONG, 200)
            assert hangs.wait(60) and tier_of(backend)._store.stats().stores == 0
            assert scheduled == [len(LONG)] + [1] * 199
        finally:
            goes_on.set()
        finish_stores(backend)
        assert tier_of(backend)._store.stats().stores == (len(LONG) + 199) // BLOCK
        forget(backend)
        assert ask(backend, LONG + answer, 4)[1] == (len(LONG) + 199) // BLOCK * BLOCK


def test_copies_that_fail_are_computed(
    checkpoint: Path, filled: tuple[Path, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#52234, vllm#49250: a failed load is no good one, and does not end the engine; nor does a store."""
    copy = np.copyto
    with engine_on(checkpoint, filled[0]) as backend:

        def fails(destination: Any, source: Any) -> None:
            raise MemoryError("no")

        monkeypatch.setattr(np, "copyto", fails)
        fresh = prompt(130, seed=41)
        assert ask(backend, LONG) == (filled[1], 0)
        expected, _ = ask(backend, fresh)
        finish_stores(backend)
        monkeypatch.setattr(np, "copyto", copy)
        forget(backend)
        assert ask(backend, LONG) == (filled[1], 288)
        assert ask(backend, fresh) == (expected, 0)


def test_host_rows_for_less_than_one_prompt(checkpoint: Path, filled: tuple[Path, list[int], list[int]]) -> None:
    """vllm#54914: rows are given away and asked for again, while loads and stores are under way."""
    with engine_on(checkpoint, filled[0], extra={"cpu_bytes_to_use": 8 * 32768}, max_num_seqs=4) as backend:
        answer, cached = ask(backend, LONG)
        assert answer == filled[1] and cached == 4 * BLOCK
        prompts = [LONG, OTHER, prompt(250, seed=51), LONG[:100] + OTHER]
        for _ in range(3):
            answers = [a.ids for a in backend.generate_many(prompts, 16, logits=False)]
            assert answers[0] == filled[1] and answers[1] == filled[2]


def test_what_vllm_reports(checkpoint: Path, filled: tuple[Path, list[int], list[int]]) -> None:
    """Where a hit came from, the metrics, and events that say which tokens are in the store."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with engine_on(checkpoint, filled[0], kv_events_config=events) as backend:
        connector, sources, told = backend.scheduler.connector, [], []
        ask_sources, take_events = connector.get_external_cache_hit_sources, connector.take_events

        def kept_sources(*arguments: Any) -> Any:
            sources.append(ask_sources(*arguments))
            return sources[-1]

        def kept_events() -> Any:
            told.extend(events := list(take_events()))
            return events

        connector.get_external_cache_hit_sources, connector.take_events = kept_sources, kept_events
        fresh = prompt(100, seed=61)
        assert ask(backend, LONG)[1] == 288
        backend._run([fresh], 4)
        finish_stores(backend)
        backend._run([fresh], 1)  # a step with a request, for vLLM to tell its counts
        metrics = {metric.name: metric.value for metric in backend._llm.get_metrics() if "deepinfer_kv" in metric.name}
    assert sources == [{CacheHitSource.DISK: 288}]
    payload = 32 * 2 * 64 * 4 * 2
    assert metrics["vllm:deepinfer_kv_hit_tokens"] == 288
    assert metrics["vllm:deepinfer_kv_load_bytes"] == 9 * payload
    assert metrics.get("vllm:deepinfer_kv_store_bytes") == 3 * payload, metrics
    assert metrics["vllm:deepinfer_kv_used_bytes"] > 12 * payload
    stored = [event for event in told if isinstance(event, BlockStored) and event.medium == "STORAGE"]
    assert sorted(sum((event.token_ids for event in stored), [])) == sorted(fresh[:96])


if __name__ == "__main__":
    store_and_hang(*sys.argv[1:])
