"""DSpark that decides how much to draft and to verify: the target's own answers, whatever it decides."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.controller import Controller
from deepinfer_vllm.spec_decode.cost_table import CostTable
from engine.foresight import foresee
from engine.harness import poison, preempt_all_every
from engine.test_dspark import (
    COUNT,
    DRAFTS,
    HEAT,
    Case,
    accepted,
    answers_to_grammars_and_images,
    make_case,
    outcomes,
    poison_draft,
    start,
)
from engine.whims import runner_of, whims
from reference import load


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("dspark-budget"))


@pytest.fixture(scope="module", autouse=True)
def nobody_chose_a_runner() -> Iterator[None]:
    """DSpark takes the one that has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        yield


@pytest.fixture(scope="module")
def backend(case: Case) -> Iterator[EngineBackend]:
    backend = start(case, max_model_len=len(case.prompts[-1]) + COUNT)  # the longest answer ends there
    yield backend
    backend.close()


def test_greedy_answers_are_the_targets(case: Case, backend: EngineBackend) -> None:
    """With any number of drafts verified and blocks left out at any time; in chunks, from the prefix cache."""
    poison(backend)
    poison_draft(backend)
    with whims(backend) as dice:
        for _ in range(2):
            found = backend.generate_many(case.prompts, COUNT)
            assert [f.ids for f in found] == case.answers
            for prompt, answer in zip(case.prompts, found, strict=True):
                want = case.reference.forward(prompt + answer.ids[:-1]).logits[len(prompt) - 1 :]
                assert answer.logits is not None
                assert (answer.logits - want).abs().max() <= 2e-4
    assert any(0 < sum(drafts) < sum(there) for there, drafts in dice.plans)
    assert any(0 in there and any(there) for there, _ in dice.plans), "some without drafts at hand, beside others"
    assert accepted(backend)[1] > 0


def test_preempted_aborted_and_stopped(case: Case, backend: EngineBackend) -> None:
    from vllm import SamplingParams

    engine = backend._llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    stops = SamplingParams(temperature=0, max_tokens=COUNT, stop_token_ids=[case.answers[1][9]], detokenize=False)
    schedule = backend.scheduler.schedule
    with whims(backend):
        preempt_all_every(backend, 4)
        for number, prompt in enumerate(case.prompts):
            engine.add_request(f"{number}", {"prompt_token_ids": prompt}, params)
        engine.add_request("stops", {"prompt_token_ids": case.prompts[1]}, stops)
        engine.add_request("aborted", {"prompt_token_ids": case.prompts[2]}, params)
        found: dict[str, list[int]] = {}
        for step in range(1000):
            if step == 6:
                engine.abort_request(["aborted"])
            found |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
            if not engine.has_unfinished_requests():
                break
    backend.scheduler.schedule = schedule
    first = case.answers[1].index(case.answers[1][9]) + 1
    assert found == {**{str(i): a for i, a in enumerate(case.answers)}, "stops": case.answers[1][:first]}


def test_drafts_after_a_pause_are_those_without_one(case: Case, backend: EngineBackend) -> None:
    """While no block runs, context rows are written all the same."""
    runner = runner_of(backend)
    verifier, speculator = runner.deepinfer_verifier, runner.speculator
    recorded = verifier.record_confidences

    def blocks(pause: range) -> dict[int, tuple[list[int], list[float]]]:
        """Each block of an answer, and its confidences, by the tokens before it. None is verified, so there are all."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        steps = itertools.count()

        def record(confidences: Any, batch: Any) -> None:
            if speculator.drafting:
                length = int(runner.req_states.total_len.gpu[batch.idx_mapping_np[0]])
                found[length] = (speculator.draft_tokens[0].tolist(), confidences[0].tolist())
            recorded(confidences, batch)

        verifier.record_confidences = record
        with whims(backend) as dice:
            dice.drafts = lambda there: np.zeros_like(there)  # type: ignore[method-assign]
            dice.wants_drafts = lambda *_: next(steps) not in pause  # type: ignore[method-assign]
            assert backend.generate(case.prompts[2], COUNT).ids == case.answers[2]
        verifier.record_confidences = recorded
        return found

    without = blocks(range(0))
    drafted = accepted(backend)[0]
    after = blocks(range(3, 20))
    assert accepted(backend)[0] - drafted < 17 * DRAFTS, "the scheduler made room for drafts that there were not"
    assert len(without) == COUNT and len(after) == COUNT - 17
    for length in after:
        assert without[length][0] == after[length][0]
        np.testing.assert_allclose(without[length][1], after[length][1], atol=1e-5)


def test_decisions_follow_live_costs(case: Case, backend: EngineBackend) -> None:
    """The engine's own controller has learnt of steps, and what was accepted; it knows how long they take."""
    verifier = runner_of(backend).deepinfer_verifier
    before = verifier.controller.costs.to_json()
    assert [f.ids for f in backend.generate_many(case.prompts, COUNT, logits=False)] == case.answers
    after = verifier.controller.costs.to_json()
    assert after["verify"]["observed"] > before["verify"]["observed"]
    assert verifier.controller.costs.error is not None


def test_over_tensor_parallel_ranks_whose_clocks_differ(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank finds every step slow and growing slower; if it went by that, the ranks' batches would differ."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send the functions below
    backend = start(case, tensor_parallel_size=2)

    def bend_clock(worker: Any) -> None:
        import time

        verifier, rank, plans = worker.model_runner.deepinfer_verifier, worker.rank, []
        verifier.times._clock = lambda: time.perf_counter() + rank * time.perf_counter() ** 2
        plan = verifier.controller.plan
        verifier.controller._worth = lambda *_: True  # on a busy machine nothing might be

        def kept(*args: Any) -> Any:
            made = plan(*args)
            plans.append((made.drafts.tolist(), made.seconds, made.drafting))
            return made

        verifier.controller.plan, verifier.kept = kept, plans

    try:
        backend._llm.collective_rpc(bend_clock)
        for _ in range(2):
            assert [f.ids for f in backend.generate_many(case.prompts, COUNT, logits=False)] == case.answers
        plans, others = backend._llm.collective_rpc(lambda worker: worker.model_runner.deepinfer_verifier.kept)
    finally:
        backend.close()
    assert plans == others and len({seconds for _, seconds, _ in plans}) > 3


def test_grammars_penalties_and_images_as_without_drafts(tmp_path: Path) -> None:
    create(tmp_path, layers=4, shards=1, dtype="float32", vision=True)
    case = Case(tmp_path, [], load(tmp_path), [])
    engine_args = {"max_num_batched_tokens": 2048, "skip_tokenizer_init": False}
    backend = start(case, speculative=None, **engine_args)
    try:
        wanted = answers_to_grammars_and_images(backend)
    finally:
        backend.close()
    foresee(tmp_path, [prompt[-1:] + answer for prompt, answer in wanted], forget=6)
    backend = start(case, **engine_args)
    try:
        with whims(backend):
            assert answers_to_grammars_and_images(backend) == wanted
        assert accepted(backend)[1] > 5
    finally:
        backend.close()


COSTS = [(tokens, 0, 0.010 + 0.0001 * tokens) for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
"""(tokens, context tokens, seconds): dear enough for a budget that binds with 64 requests."""


@pytest.mark.parametrize("form", ["early-stop", "delayed"])
def test_random_answers_have_the_targets_distribution(case: Case, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded, at costs that are given, so the same budgets and draws every time."""
    from vllm import SamplingParams

    monkeypatch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", form)
    prompt, count = case.prompts[3], 500
    tokens = sorted({*case.answers[3][:5]})
    expected = outcomes(case, prompt, tokens, depth=3)
    fixed = {"temperature": HEAT, "max_tokens": 5, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(seed=seed, allowed_token_ids=tokens, **fixed) for seed in range(count)]
    speculative = {"draft_sample_method": "probabilistic"}
    backend = start(case, speculative=speculative, max_num_seqs=64, max_num_batched_tokens=1024)
    verifier, budgets = runner_of(backend).deepinfer_verifier, []
    assert verifier.controller.settings.form == form
    costs = CostTable.measured(COSTS, [(1, 0, 0.002), (64, 0, 0.003)])
    # The random head is sure of nearly everything; cooled down, some drafts are worth their price and some are not.
    controller = Controller(Calibration((8.0,) * DRAFTS), costs, verifier.controller.settings)
    for name in ("observe_verify", "observe_plain", "observe_draft"):
        setattr(controller, name, lambda *_: None)
    controller.wants_drafts = lambda *_: True  # type: ignore[method-assign, assignment]
    asked = "plan" if form == "early-stop" else "plan_ahead"
    verifier.controller, plan = controller, getattr(controller, asked)

    def kept(confidences: Any, scheduled: Any, *sizes: int) -> Any:
        made = plan(confidences, scheduled, *sizes)
        budgets.append((int(scheduled.sum()), made.budget))
        return made

    setattr(controller, asked, kept)
    try:
        found = backend._llm.generate([{"prompt_token_ids": prompt}] * count, params, use_tqdm=False)
        assert accepted(backend)[1] > count / 50
    finally:
        backend.close()
    assert sum(0 < budget < there for there, budget in budgets) > 5
    drawn = Counter(tuple(o.outputs[0].token_ids[:3]) for o in found)
    assert drawn.keys() <= expected.keys()
    for outcome, chance in expected.items():
        spread = (count * chance * (1 - chance)) ** 0.5
        assert abs(drawn[outcome] - count * chance) <= 4 * spread + 1, (outcome, drawn[outcome], count * chance)
