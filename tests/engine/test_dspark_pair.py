"""The trained pair over tensor-parallel ranks, and in an engine that is killed while it drafts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.spec_decode import calibration_file, records
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.calibration_file import Made, checkpoint_digest
from engine.test_trained_pair import COUNT, DRAFTS, _assert_greedy, prompts

TESTS = Path(__file__).parent.parent
SECONDS = 240.0


def test_over_tensor_parallel_ranks_with_the_budget_on(trained_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of the same engine without a draft, and the target's own; ranks plan alike, and drafts stand."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send the functions below
    monkeypatch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", "auto")
    asked = [ids for workload in ("records", "code", "prose", "noise") for ids in prompts(workload, 2)]
    speculative = {"method": "dspark", "num_speculative_tokens": DRAFTS}

    def draft(worker: Any, drafting: bool) -> None:
        """Whether to draft at all, which on a busy machine nothing might be worth. The budget says how much of it."""
        controller = worker.model_runner.deepinfer_verifier.controller
        controller._worth = lambda *_: drafting

    def keep(worker: Any) -> None:
        controller, plans = worker.model_runner.deepinfer_verifier.controller, []
        plan = controller.plan

        def kept(*args: Any) -> Any:
            plans.append(made := plan(*args))
            return made

        controller.plan, controller.kept = kept, plans

    def kept(worker: Any) -> list[list[int]]:
        return [plan.drafts.tolist() for plan in worker.model_runner.deepinfer_verifier.controller.kept]

    backend = EngineBackend(
        trained_pair,
        "float32",
        "plain",
        block_size=16,
        tensor_parallel_size=2,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    try:
        answers = []
        for drafting in (False, True):
            backend._llm.collective_rpc(draft, args=(drafting,))
            if drafting:
                backend._llm.collective_rpc(keep)
            answers.append([found.ids for found in backend.generate_many(asked, COUNT, logits=False)])
        plans, others = backend._llm.collective_rpc(kept)
        counts = {m.name: m.value for m in backend._llm.get_metrics() if hasattr(m, "value")}
    finally:
        backend.close()
    assert answers[1] == answers[0]
    _assert_greedy(asked, answers[1])
    assert plans == others and any(any(drafts) for drafts in plans)
    assert counts["vllm:spec_decode_num_accepted_tokens"] > COUNT


@contextmanager
def drafting(checkpoint: Path, root: Path, **environment: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What an engine in a process of its own says, which is killed at the end."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": path}
    engine = subprocess.Popen(
        [sys.executable, str(TESTS / "drafting_engine.py"), str(checkpoint), str(root)],
        env={**os.environ, **fixed, **environment},
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert engine.stdout is not None
        yield (json.loads(line) for line in engine.stdout if line.startswith('{"answers"'))
        engine.send_signal(signal.SIGKILL)
        assert engine.wait() == -signal.SIGKILL, "it ended by itself"
    finally:
        engine.kill()
        engine.wait()


def test_killed_while_it_drafts(trained_pair: Path, tmp_path: Path) -> None:
    """What comes after answers the same, from what is stored, with the calibration, and goes on with the record."""
    record, calibration, root = tmp_path / "records", tmp_path / "calibration.json", tmp_path / "root"
    made = Made(checkpoint_digest(trained_pair), DRAFTS, "float32", "plain", "greedy")
    calibration_file.write(calibration, Calibration((1.5,) * DRAFTS), made)
    written = calibration.read_bytes()
    environment = {
        "DEEPINFER_VLLM_DSPARK_BUDGET": "auto",
        "DEEPINFER_VLLM_DSPARK_RECORD": str(record),
        "DEEPINFER_VLLM_DSPARK_CALIBRATION": str(calibration),
    }
    with drafting(trained_pair, root, **environment) as said:
        first = next(said)
        deadline = time.monotonic() + SECONDS
        while not record.exists() or not records.read(record):  # written a second late, while the engine works
            assert time.monotonic() < deadline and next(said)["answers"] == first["answers"]
    before = records.read(record)
    assert before.keys() == {made} and first["calibrated"] == 1.0
    with drafting(trained_pair, root, **environment) as said:
        again = next(said)
        assert again["answers"] == first["answers"] and again["calibrated"] == 1.0
        assert again["hits"] > 0, "the rows that the killed engine stored are found"
        deadline = time.monotonic() + SECONDS
        while len(records.read(record)[made].drafted) <= len(before[made].drafted):
            assert time.monotonic() < deadline and next(said)["answers"] == first["answers"]
    after = records.read(record)
    assert after.keys() == {made}
    for name in ("confidences", "drafted", "accepted", "requests"):
        kept = getattr(after[made], name)[: len(before[made].drafted)]
        assert kept.tolist() == getattr(before[made], name).tolist()
    assert calibration.read_bytes() == written
