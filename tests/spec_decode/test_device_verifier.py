"""vLLM's manager with our rule, its device being this machine: what the host counts is what the device takes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from deepinfer_vllm.spec_decode.budget import allot, survival
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.settings import Settings

REQUESTS, POSITIONS = 12, 5


class Event:
    """A moment of a device that is always done."""

    now = 0.0

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1000


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker.cpu import shm  # noqa: F401 (streams and events of a CPU)

    from deepinfer_vllm.spec_decode import device_verifier

    monkeypatch.setattr(
        device_verifier,
        "get_tp_group",
        lambda: SimpleNamespace(world_size=1, broadcast_object=lambda given, src=0: given),
    )
    monkeypatch.setattr(
        "vllm.v1.worker.gpu.spec_decode.adaptive_verification.get_tp_group", device_verifier.get_tp_group
    )
    states = SimpleNamespace(
        num_speculative_steps=POSITIONS,
        max_num_reqs=REQUESTS,
        max_num_batched_tokens=512,
        device=torch.device("cpu"),
        req_id_to_index={f"r{i}": (5 * i) % REQUESTS for i in range(REQUESTS)},
        num_computed_tokens_np=np.full(REQUESTS, 100),
        prefill_len=SimpleNamespace(np=np.full(REQUESTS, 100)),
    )
    starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
    arguments = {"query_start_loc": starts, "num_bonus_tokens": 1, "max_total_logits": 1000}
    made = device_verifier.DeviceVerifier(states, **arguments)
    made.arguments = {"req_states": states, **arguments}
    made.configure(Settings("delayed", "off", "", True), Calibration((2.0, 1.0, 0.5, 1.0, 1.0)), event=lambda: Event())
    return made


def profile(verifier: Any) -> None:
    """Steps of 1 ms and 0.1 ms a token, and 10 ns a token of context."""
    samples = []
    for batch in verifier.batches_to_profile([1, 2, 4, 8, *range(12, 73, 4)]):
        tokens, requests = batch["num_tokens"], min(batch["num_tokens"], REQUESTS)
        forward_ms = 1.0 + 0.1 * tokens + 1e-5 * requests * batch["context_len"]
        samples.append(
            SimpleNamespace(
                num_target_tokens=tokens,
                num_reqs=requests,
                forward_ms=forward_ms,
                drafter_ms=0.5,
                full_cudagraph=tokens <= 72,
            )
        )
    verifier.set_initial_cost_curves(samples)


def draft(verifier: Any, confidences: torch.Tensor) -> None:
    slots = torch.tensor(list(verifier.req_states.req_id_to_index.values()))
    verifier.record_confidences(confidences, SimpleNamespace(num_reqs=REQUESTS, idx_mapping=slots))


def test_the_device_takes_as_many_as_the_host_counts(verifier: Any) -> None:
    profile(verifier)
    generator = torch.Generator().manual_seed(0)
    for slot in range(REQUESTS):
        verifier.add_request(slot)
    ids = list(verifier.req_states.req_id_to_index)
    slots = torch.tensor(list(verifier.req_states.req_id_to_index.values()))
    budgets = []
    for _ in range(6):
        confidences = 0.5 + 0.5 * torch.rand(REQUESTS, POSITIONS, generator=generator)
        draft(verifier, confidences)
        tokens = verifier.get_num_tokens(dict.fromkeys(ids, 1 + POSITIONS), {i: [-1] * POSITIONS for i in ids})
        budget = tokens - REQUESTS
        scheduled = np.full(REQUESTS, POSITIONS, np.int32)
        counts, _ = verifier.compact_batch(scheduled, scheduled + 1, np.arange(REQUESTS + 1) * 6)
        logits, starts, drafts = verifier.reallocate_drafts(ids, slots)[:3]
        assert counts.sum() == tokens == starts[-1] and drafts == budget == logits[-1] - REQUESTS
        if budget < REQUESTS * POSITIONS:
            cool = torch.sigmoid(torch.logit(confidences, eps=1e-6) / torch.tensor((2.0, 1.0, 0.5, 1.0, 1.0)))
            wanted = allot(survival(cool.numpy(), scheduled), budget)
            assert (logits.diff() - 1).tolist() == wanted.tolist()
        budgets.append(budget)
    assert len({*budgets}) > 2 and min(budgets[2:]) > 0 and max(budgets[2:]) < REQUESTS * POSITIONS


def test_costs_know_contexts_and_follow_live_times(verifier: Any) -> None:
    profile(verifier)
    costs = verifier.controller.costs
    near, far = (float(costs.verify_s(16, 16, context)[0]) for context in (0, 100_000))
    assert far - near == pytest.approx(1e-3, rel=0.1)
    ids = list(verifier.req_states.req_id_to_index)
    at_start = costs.verify_s(1, 72, 1200)
    for _ in range(200):
        verifier.get_num_tokens(dict.fromkeys(ids, 1 + POSITIONS), {i: [-1] * POSITIONS for i in ids})
        Event.now += 0.1
        draft(verifier, torch.full((REQUESTS, POSITIONS), 0.9))
    tokens = verifier._sizes[0]
    assert float(costs.verify_s(tokens, tokens, 1200)[0]) > 2 * at_start[tokens - 1]


def test_only_the_delayed_form_fits(verifier: Any) -> None:
    with pytest.raises(ValueError, match="form=early-stop"):
        verifier.configure(Settings("early-stop", "off", "", True), None)


@pytest.mark.parametrize(
    ("method", "budget", "ours"), [("dspark", "", True), ("eagle", "", False), ("dspark", "fixed", False)]
)
def test_it_stands_where_vllm_has_its_manager(
    verifier: Any, method: str, budget: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    from deepinfer_vllm.compat.dspark import decide_by_our_rule

    monkeypatch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", budget)
    monkeypatch.setenv("DEEPINFER_VLLM_DSPARK_CALIBRATION", "off")
    module = SimpleNamespace(AdaptiveVerificationManager=AdaptiveVerificationManager)
    module.maybe_create_adaptive_verification_manager = lambda *, vllm_config, **given: (
        module.AdaptiveVerificationManager(**given) if vllm_config.adaptive else None
    )
    for _ in range(2):
        decide_by_our_rule(module)
    speculative = SimpleNamespace(method=method, enable_adaptive_verification=True)
    config = SimpleNamespace(speculative_config=speculative, adaptive=True)
    made = module.maybe_create_adaptive_verification_manager(vllm_config=config, **verifier.arguments)
    assert type(made) is (type(verifier) if ours else AdaptiveVerificationManager)
    assert not ours or made.settings.form == "delayed"
    assert module.AdaptiveVerificationManager is AdaptiveVerificationManager
    config.adaptive = False
    assert module.maybe_create_adaptive_verification_manager(vllm_config=config, **verifier.arguments) is None
