"""Windows that a connector kept where a turn ended: loaded, a prefix hit is what the same tokens were when computed."""

from pathlib import Path
from typing import Any

import pytest

from deepinfer_kvstore.snapshot_directory import Holder, SnapshotDirectory
from deepinfer_kvstore.snapshot_server import SnapshotServer
from deepinfer_kvstore.snapshots import SnapshotRing
from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.checkpoint.interface import Generation
from deepinfer_vllm.kv_connector.snapshots import SnapshotScheduler
from deepinfer_vllm.kv_connector.windows import WindowCopies
from engine.harness import GOLDEN, Engine, golden_prompts, model_of, poison
from engine.kvstore import SECONDS, engine_on, finish_stores, transfer
from engine.test_replay import MAX_ABS, WINDOW, assert_truncated, reference

TURN = 200  # tokens of the first prompt
ANSWER = 60  # the turn ends with 259 tokens computed, so its snapshot lies at 256


@pytest.fixture(params=["V1", "V2"])
def runner(request: pytest.FixtureRequest) -> str:
    """Both of vLLM's model runners."""
    return str(request.param)


def forget_blocks(backend: EngineBackend) -> None:
    """Empty the engine's own prefix cache; what a connector keeps stays."""
    finish_stores(backend)
    assert backend._llm.reset_prefix_cache()
    poison(backend)


def ring_of(backend: EngineBackend) -> Any:
    return backend.scheduler.connector._snapshots._ring


def tokens_computed(backend: EngineBackend) -> list[int]:
    """A list that will hold how many tokens each step runs through the first layer."""
    counts: list[int] = []
    model_of(backend).layers[0].ffn.experts.register_forward_hook(lambda _, inputs, __: counts.append(len(inputs[0])))
    return counts


def test_a_turn_goes_on_from_its_snapshot(engine: Engine, tmp_path: Path, runner: str) -> None:
    prompt = golden_prompts("v41-tiny-a")[4].input_ids.tolist()
    store = transfer(tmp_path, swa_bytes=1 << 24)
    with engine("v41-tiny-a", replay=True, runner=runner, kv_transfer_config=store) as backend:
        poison(backend)
        counts = tokens_computed(backend)
        first = backend.generate(prompt[:TURN], ANSWER)
        assert_truncated(first, prompt[:TURN], TURN - WINDOW)

        # So few new tokens that they see the windows of the turn before: all of it, as if it had not ended.
        turn = prompt[:TURN] + first.ids + prompt[-2:]
        forget_blocks(backend)
        counts.clear()
        assert_truncated(backend.generate(turn, 24), turn, TURN - WINDOW)
        assert counts[0] == len(turn) - 256
        assert ring_of(backend).stats().counts["hit"] == 1

        # Without the snapshot the window before the hit is computed again, and is another.
        forget_blocks(backend)
        snapshots, backend.scheduler.connector._snapshots = backend.scheduler.connector._snapshots, None
        counts.clear()
        replayed = backend.generate(turn, 24)
        backend.scheduler.connector._snapshots = snapshots
        assert counts[0] == len(turn) - 256 + WINDOW
        assert_truncated(replayed, turn, len(turn) - WINDOW)
        whole = reference().forward(turn + replayed.ids[:-1], replay_from=TURN - WINDOW).logits[len(turn) - 1 :]
        assert replayed.logits is not None
        assert (replayed.logits - whole).abs().max() > 10 * MAX_ABS

        # So many that they fill the windows themselves: what a cold run gives, for less.
        longer = prompt[:TURN] + first.ids + prompt[-40:]
        forget_blocks(backend)
        counts.clear()
        assert_truncated(backend.generate(longer, 24), longer, len(longer) - WINDOW)
        assert counts[0] == len(longer) - 256


def test_what_is_not_whole_is_not_kept(engine: Engine, tmp_path: Path, runner: str) -> None:
    """A prefill skips window rows before its last ones; a snapshot that lacks them would be read as if it had them."""
    prompt = golden_prompts("v41-tiny-a")[4].input_ids.tolist()
    store = transfer(tmp_path, swa_bytes=1 << 24)
    with engine("v41-tiny-a", replay=True, runner=runner, kv_transfer_config=store) as backend:
        cases = [(200, 2, False), (230, 2, False), (223, 2, True), (224, 2, True), (200, 26, True)]
        for number, (length, count, whole) in enumerate(cases):
            before = ring_of(backend).stats().held
            backend.generate([number, *prompt[1:length]], count)
            finish_stores(backend)
            assert ring_of(backend).stats().held - before == whole, (length, count)


def exact(answer: Generation, prompt: list[int]) -> None:
    """The answer is the model's without any approximation."""
    assert_truncated(answer, prompt, 0)


def test_snapshots_of_whole_rows_make_hits_exact(engine: Engine, tmp_path: Path, runner: str) -> None:
    """No chunk exceeds the window, so nothing is skipped: then hits and company change nothing at all.

    Memory is so tight that blocks of a turn that ended are given away while they are still to be stored.
    """
    prompts = [p.input_ids.tolist()[:TURN] for p in golden_prompts("v41-tiny-a")[3:6]]
    options = {"max_num_batched_tokens": WINDOW, "max_num_seqs": 3, "max_model_len": 512}
    options["num_gpu_blocks_override"] = 60
    store = transfer(tmp_path, swa_bytes=1 << 24)
    with engine("v41-tiny-a", replay=True, runner=runner, kv_transfer_config=store, **options) as backend:
        poison(backend)
        answers = backend.generate_many(prompts, ANSWER)
        turns = [prompt + answer.ids + prompt[7:13] for prompt, answer in zip(prompts, answers, strict=True)]
        forget_blocks(backend)
        for answer, turn in zip(backend.generate_many(turns, 24), turns, strict=True):
            exact(answer, turn)
        assert ring_of(backend).stats().counts["hit"] == len(turns)


def test_memory_for_one_request_is_left_to_it(engine: Engine, tmp_path: Path) -> None:
    """Windows that stay would keep the longest request waiting for ever."""
    prompt = golden_prompts("v41-tiny-a")[5].input_ids.tolist()[:480]
    options = {"max_num_batched_tokens": WINDOW, "max_model_len": 512, "num_gpu_blocks_override": 36}
    store = transfer(tmp_path, swa_bytes=1 << 24)
    with engine("v41-tiny-a", replay=True, runner="V2", kv_transfer_config=store, **options) as backend:
        poison(backend)
        for _ in range(2):
            exact(backend.generate(prompt, 32), prompt)
            forget_blocks(backend)
        assert ring_of(backend).stats().held == 0


def test_a_snapshot_that_cannot_be_loaded_is_computed_again(
    engine: Engine, tmp_path: Path, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = golden_prompts("v41-tiny-a")[4].input_ids.tolist()
    store = transfer(tmp_path, swa_bytes=1 << 24)
    with engine("v41-tiny-a", replay=True, runner=runner, kv_transfer_config=store) as backend:
        poison(backend)
        first = backend.generate(prompt[:TURN], ANSWER)
        turn = prompt[:TURN] + first.ids + prompt[-2:]
        forget_blocks(backend)
        with monkeypatch.context() as patch:
            tried: list[int] = []
            patch.setattr(WindowCopies, "restore", lambda self, blocks, payload: bool(tried.append(len(payload))))
            assert_truncated(backend.generate(turn, 24), turn, len(turn) - WINDOW)
            assert len(tried) == 1

        ring, (key, *_) = ring_of(backend), ring_of(backend)._held
        damaged = bytearray(ring._held[key].payload)
        damaged[5] ^= 1
        ring._held[key].payload = bytes(damaged)
        forget_blocks(backend)
        assert_truncated(backend.generate(turn, 24), turn, len(turn) - WINDOW)
        assert ring.stats().counts["corrupt"] == 1


def test_without_snapshots_a_turn_goes_on_from_where_it_ended_too(engine: Engine, tmp_path: Path, runner: str) -> None:
    """Off by default. Windows of other layers are blocks in the store; vLLM alone stores those at the prompt's end."""
    prompt = golden_prompts("v41-tiny-a")[4].input_ids.tolist()
    with engine("v41-tiny-a", replay=True, runner=runner, kv_transfer_config=transfer(tmp_path)) as backend:
        poison(backend)
        assert backend.scheduler.connector._snapshots is None
        first = backend.generate(prompt[:TURN], ANSWER)
        turn = prompt[:TURN] + first.ids + prompt[-2:]
        forget_blocks(backend)
        counts = tokens_computed(backend)
        assert_truncated(backend.generate(turn, 24), turn, len(turn) - WINDOW)
        assert counts[0] == len(turn) - 256 + WINDOW


TOKEN = "the token of these nodes"


def let_searches_end_late(patch: pytest.MonkeyPatch) -> None:
    """Another node's snapshot comes at the worst moment: when it has just not been found here."""
    choose = SnapshotScheduler.choose

    def choose_early(self: SnapshotScheduler, request: Any, *sizes: int) -> int | None:
        found = choose(self, request, *sizes)
        if (search := self._requests[request.request_id].search) is not None:
            search.result(SECONDS)
        return found

    patch.setattr(SnapshotScheduler, "choose", choose_early)


def test_a_turn_goes_on_from_another_nodes_snapshot(
    tmp_path: Path, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_searches_end_late(monkeypatch)
    prompt = golden_prompts("v41-tiny-a")[4].input_ids.tolist()
    arguments = {"replay": True, "runner": runner}
    with engine_on(GOLDEN / "v41-tiny-a", tmp_path / "root", extra={"swa_bytes": 1 << 24}, **arguments) as backend:
        first = backend.generate(prompt[:TURN], ANSWER)
        finish_stores(backend)
        taken = {key: held.payload for key, held in ring_of(backend)._held.items()}
    directory, node = SnapshotDirectory(), SnapshotRing(1 << 24)
    directory_server = SnapshotServer(("127.0.0.1", 0), TOKEN, directory=directory, insecure=True)
    node_server = SnapshotServer(("127.0.0.1", 0), TOKEN, ring=node, insecure=True)
    for key, payload in taken.items():
        node.put(key, payload, key)
        length, digest, seconds = node.describe(key) or (0, b"", 0.0)
        directory.announce(key, Holder(f"127.0.0.1:{node_server.port}", length, digest, seconds))
    (tmp_path / "token").write_text(TOKEN + "\n")
    shared = {
        "swa_bytes": 1 << 24,
        "swa_directory": f"127.0.0.1:{directory_server.port}",
        "swa_listen": "127.0.0.1:0",
        "swa_token_file": str(tmp_path / "token"),
        "swa_insecure": True,
        "swa_wait_s": 60,
    }
    turn = prompt[:TURN] + first.ids + prompt[-2:]
    with engine_on(GOLDEN / "v41-tiny-a", tmp_path / "root", extra=shared, **arguments) as backend:
        poison(backend)
        counts = tokens_computed(backend)
        answer = backend.generate(turn, 24)
        counted = backend.scheduler.connector._sums()
        assert (counted["snapshots", ("fetched",)], counted["snapshots", ("hit",)]) == (1, 1)
        assert counts[0] == len(turn) - 256
        assert_truncated(answer, turn, TURN - WINDOW)
    node_server.close()
    directory_server.close()
