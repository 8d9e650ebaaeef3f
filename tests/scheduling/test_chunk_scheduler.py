"""The scheduler over vLLM's own, on an engine whose clock is a cost: what it learns, keeps to, and never does."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import BLOCK, TRUE, Engine, make, request, start

from deepinfer_costmodel.step_table import StepTable, read_step_table
from deepinfer_vllm.scheduling.metrics import COUNTERS, DEFINITIONS, GAUGES, HISTOGRAMS
from deepinfer_vllm.scheduling.scheduler import AsyncCostModelScheduler, CostModelScheduler

MODES = pytest.mark.parametrize(("asynchronous", "drafts"), [(False, 0), (True, 0), (False, 3), (True, 3)])
KEY = "deepinfer_sched"


def mixed(engine: Engine, *, decodes: int = 16, prompts: int = 12) -> float:
    """Requests that decode, then long prompts beside them. Returns when these came."""
    engine.add(*(request(f"d{number}", 200 + 40 * number, 400) for number in range(decodes)))
    for _ in range(20):
        engine.step()
    came_s = engine.now_s
    engine.add(*(request(f"p{number}", 6000 + 900 * number, 5) for number in range(prompts)))
    return came_s


def test_one_name_makes_the_scheduler_of_the_mode() -> None:
    assert type(make()) is CostModelScheduler
    assert type(make(asynchronous=True)) is AsyncCostModelScheduler


@MODES
def test_keeps_to_the_target_and_learns_what_steps_take(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool, drafts: int
) -> None:
    """The clock is simulated, with 5 % of noise: this is no timing."""
    engine = start(monkeypatch, make(asynchronous=asynchronous, drafts=drafts), noise=0.05)
    came_s = mixed(engine)
    while engine.scheduler.has_requests() and len(engine.steps) < 240:
        engine.step()
    costs = engine.scheduler._costs
    assert costs.error <= 0.10
    learning = came_s + 1.0  # some 30 steps
    waits = engine.intervals(learning)
    p99 = waits[int(0.99 * len(waits))]
    assert 0.03 * 0.85 <= p99 <= 0.03 * 1.15
    assert all(load.tokens for load, _ in engine.steps[25:100])  # and no step without a prompt


@MODES
def test_the_answers_are_those_of_the_stock_scheduler(
    monkeypatch: pytest.MonkeyPatch, settings: Any, asynchronous: bool, drafts: int
) -> None:
    """With preemptions, for there are few blocks; answers depend on nothing but their request and place."""
    settings(GRID=16, TARGET_MS=8)
    answers = []
    for cost_model in (False, True):
        made = make(cost_model=cost_model, asynchronous=asynchronous, drafts=drafts, blocks=150)
        engine = start(monkeypatch, made, noise=0.1)
        preempted = []
        original = made._preempt_request

        def preempt(one: Any, *args: Any, original: Any = original, seen: Any = preempted, **kwargs: Any) -> Any:
            seen.append(one.request_id)
            return original(one, *args, **kwargs)

        made._preempt_request = preempt
        engine.add(*(request(f"r{number}", 40 + 61 * number, 120, shared=30) for number in range(12)))
        engine.run()
        assert preempted
        pool = made.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        answers.append({name: tokens[:120] for name, tokens in engine.answers.items()})
    assert answers[1] == answers[0] and len(answers[0]) == 12


def test_the_oldest_prompt_goes_on_in_every_step(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """With a target that not even the decodes keep to, prompts go on by a piece of the grid a step, in order."""
    settings(TARGET_MS=1, PREFILL_SHARE=0)
    engine = start(monkeypatch, make())
    mixed(engine, prompts=3)
    shares: dict[str, int] = {}
    for _ in range(150):
        before = {name: len(chunks) for name, chunks in engine.chunks.items()}
        engine.step()
        grown = [name for name in engine.chunks if name[0] == "p" and len(engine.chunks[name]) > before.get(name, 0)]
        for name in grown:
            shares[name] = shares.get(name, 0) + 1
    assert shares["p0"] == 47 + 5 - 1 and shares["p1"] == 54 + 5 - 1  # 6000 and 6900 tokens, and answers
    assert all(count <= 128 for name in ("p0", "p1") for _, count in engine.chunks[name])


def test_chunks_keep_off_images_and_end_at_checkpoints(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings(TARGET_MS=10, GRID=64)
    engine = start(monkeypatch, make())
    engine.add(*(request(f"d{number}", 100, 2000) for number in range(8)))
    for _ in range(5):
        engine.step()
    images = [(130, 900), (1100, 40), (1140, 300)]
    engine.add(request("i", 3000, 2, images=images, checkpoints=[70, 500, 1450, 2000]))
    engine.run()
    ends = [start + count for start, count in engine.chunks["i"] if start + count <= 3000]
    assert {70, 1450, 2000} <= set(ends)  # 500 is inside an image
    assert not any(first < end < first + tokens for end in ends for first, tokens in images)
    edges = {130, 1030, 1100, 1140, 1440}
    assert all(end % 64 == 0 or end in edges | {70, 1450, 2000, 3000} for end in ends)
    cuts = sum((report or {}).get(KEY, {}).get("counters", {}).get("checkpoint_cuts", 0) for report in engine.reports)
    assert cuts == 3


def test_images_behind_the_cut_are_not_encoded_yet(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings(TARGET_MS=12, CHUNK=768)
    engine = start(monkeypatch, make())
    engine.add(*(request(f"d{number}", 100, 800) for number in range(8)))
    for _ in range(5):
        engine.step()
    engine.add(request("i", 4000, 2, images=[(1000 * n, 200) for n in range(4)]))
    engine.run()
    assert [first for first, _ in engine.encoded] == [0, 1000, 2000, 3000]
    assert all(first < end <= first + 1000 for first, end in engine.encoded)


@pytest.mark.parametrize("limit", [4096, 20_000])
def test_the_context_of_a_steps_chunks_is_limited(monkeypatch: pytest.MonkeyPatch, settings: Any, limit: int) -> None:
    settings(CONTEXT=limit, TARGET_MS=0)
    engine = start(monkeypatch, make())
    engine.add(*(request(f"p{number}", 9000 + number, 3) for number in range(4)))
    reached = []
    while engine.scheduler.has_requests():
        before = {name: len(chunks) for name, chunks in engine.chunks.items()}
        engine.step()
        new = [chunks[-1] for name, chunks in engine.chunks.items() if len(chunks) > before.get(name, 0)]
        reached.append([sum(chunk) for chunk in new if chunk[1] > 1])
    for ends in filter(None, reached):
        assert sum(ends) <= limit or len(ends) == 1  # one that is beyond it by itself goes on by the grid
    assert any(len(ends) > 1 for ends in reached) == (limit == 20_000)


def test_chunks_have_a_largest_size(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings(CHUNK=1024)
    engine = start(monkeypatch, make())
    engine.add(request("p", 10_000, 2))
    engine.run()
    assert [count for _, count in engine.chunks["p"]] == [1024] * 9 + [784, 1]


def test_prefix_hits_shift_no_cut_off_the_grid(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings(TARGET_MS=8)
    engine = start(monkeypatch, make())
    engine.add(request("a", 1000, 300, shared=900))
    engine.step()
    engine.add(*(request(f"{name}", 3000, 3, shared=900) for name in "bc"))
    engine.run()
    for name in "bc":
        start_at = engine.chunks[name][0][0]
        assert start_at == 896 // BLOCK * BLOCK and start_at > 0
        ends = [first + count for first, count in engine.chunks[name] if count > 1]
        assert all(end % 128 == 0 for end in ends[:-1]) and ends[-1] == 3000


def test_prefixes_are_not_looked_up_for_what_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(monkeypatch, make())
    mixed(engine, prompts=30)
    for _ in range(60):
        engine.step()
    looked = []
    original = engine.scheduler.kv_cache_manager.get_computed_blocks
    monkeypatch.setattr(
        engine.scheduler.kv_cache_manager, "get_computed_blocks", lambda one: looked.append(one) or original(one)
    )
    steps = len(engine.steps)
    while len(engine.scheduler.waiting) > 5:
        engine.step()
    assert len(looked) < 0.5 * (len(engine.steps) - steps)
    assert engine.scheduler.max_num_active_reqs == 64


def test_what_it_learnt_is_where_the_next_one_starts(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    file = tmp_path / "costs.json"
    settings(COSTS=file)
    first = start(monkeypatch, make())
    assert not file.exists()
    mixed(first)
    first.run()
    first.scheduler.shutdown()
    written = read_step_table(file)
    assert written.costs.keys() == {"full"} and "fitted to" in written.sources["full"]
    second = make()
    assert second._costs.now == written.costs["full"]


def test_a_server_that_is_killed_has_written_before(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    """Nobody tells it of its end. First after few steps, then rarely."""
    file = tmp_path / "costs.json"
    settings(COSTS=file)
    engine = start(monkeypatch, make())
    steps: list[int] = []
    put = engine.scheduler._costs._put
    monkeypatch.setattr(engine.scheduler._costs, "_put", lambda cost, count: (steps.append(count), put(cost, count)))
    engine.add(request("p", 100, 600))
    engine.run()
    deadline = time.monotonic() + 30
    while not file.exists() or len(steps) < 4:
        assert time.monotonic() < deadline, steps
        time.sleep(0.01)
    assert read_step_table(file).costs.keys() == {"full"}
    first, *more = sorted(steps)
    assert 64 <= first < 128 and all(2 * a <= b < 2 * a + 64 for a, b in zip([first, *more], more, strict=False))


@pytest.mark.parametrize("text", ["{", '{"schema": "deepinfer.costs/1", "sets": {}}', ""])
def test_a_spoilt_file_is_said_and_forgotten(settings: Any, tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    settings(COSTS=file)
    costs = make()._costs
    assert costs.now == costs._fit.prior


def test_a_directory_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path) -> None:
    settings(COSTS=tmp_path / "none" / "costs.json")
    engine = start(monkeypatch, make())
    engine.add(request("p", 500, 3))
    engine.run()
    engine.scheduler.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_even_be_looked_for_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    settings(COSTS=tmp_path / ("x" * 300))
    engine = start(monkeypatch, make())
    engine.add(request("p", 500, 3))
    engine.run()
    engine.scheduler.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_costs_of_another_kind_of_model_are_not_used(settings: Any, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(StepTable({"full": TRUE}, {"full": "a model without an index"}).to_json()))
    settings(COSTS=file)
    costs = make()._costs  # of a checkpoint whose index selects 32
    assert costs.now == costs._fit.prior and costs.now.prefill.cap_tokens == 32


def test_reports_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(monkeypatch, make(), noise=0.05)
    mixed(engine, prompts=4)
    engine.run()
    reports = [report[KEY] for report in engine.reports if report and KEY in report]
    assert {name for report in reports for name in report["gauges"]} == GAUGES.keys()
    assert {name for report in reports for name in report["histograms"]} == HISTOGRAMS.keys()
    totals = {name: sum(report["counters"].get(name, 0) for report in reports) for name in COUNTERS}
    tokens = sum(load.tokens for load, _ in engine.steps)
    chunks = sum(load.chunks for load, _ in engine.steps)
    assert (totals["chunk_tokens"], totals["chunks"]) == (tokens, chunks)
    assert totals["mixed_steps"] == sum(1 for load, _ in engine.steps if load.chunks and load.decodes)
    measured = [value for report in reports for value in report["histograms"].get("measured_step_seconds", [])]
    assert sum(measured) == pytest.approx(sum(seconds for _, seconds in engine.steps), rel=0.01)
    assert reports[-1]["gauges"]["target_seconds"] == 0.03


def test_aborted_requests_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.request import RequestStatus

    engine = start(monkeypatch, make())
    engine.add(request("i", 5000, 5, images=[(300, 200)], checkpoints=[1000]), request("d", 100, 30))
    engine.step()
    assert len(engine.scheduler._cuts) == 1
    engine.scheduler.finish_requests(["i"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert len(engine.scheduler._cuts) == 0


def test_models_whose_chunks_vllm_cuts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "need_mamba_block_aligned_split", True, raising=False)
    original = Scheduler.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.need_mamba_block_aligned_split = True

    monkeypatch.setattr(Scheduler, "__init__", init)
    with pytest.raises(ValueError, match="leave --scheduler-cls out for this model"):
        make()


def test_a_grid_above_the_largest_chunk_is_refused(settings: Any) -> None:
    settings(CHUNK=64)
    with pytest.raises(ValueError, match="SCHED_CHUNK=64 is less than DEEPINFER_VLLM_SCHED_GRID=128"):
        make()


def test_without_chunked_prefill_it_cuts_nothing(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings(TARGET_MS=1)
    engine = start(monkeypatch, make(enable_chunked_prefill=False, max_num_batched_tokens=8192))
    engine.add(request("d", 100, 50))
    engine.step()
    engine.add(request("p", 4000, 2))
    engine.run()
    assert [count for _, count in engine.chunks["p"]] == [4000, 1]


def test_the_page_has_the_table_of_metrics(root: Path) -> None:
    assert DEFINITIONS.markdown_table() in (root / "docs" / "scheduling.md").read_text()
