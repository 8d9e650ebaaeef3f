"""Costs from dummy steps, on a clock that the steps turn."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from deepinfer_vllm.spec_decode import start_costs


class Runner:
    """A machine on which a step of n tokens takes `fixed_s` + n * `token_s`, and a hundredth of that to draft."""

    max_num_tokens, max_num_reqs, max_model_len, decode_query_len = 2048, 16, 4096, 6

    def __init__(self, fixed_s: float, token_s: float) -> None:
        self.fixed_s, self.token_s, self.now = fixed_s, token_s, 0.0
        self.sizes: list[int] = []
        self.speculator = SimpleNamespace(proposal_s=0.0, proposed_for=0, now=lambda: self.now)
        self.model = SimpleNamespace(compute_logits=lambda hidden: None)

    def _dummy_run(self, tokens: int, *, context_len: int, **_: Any) -> tuple[range, None]:
        assert context_len >= 1
        self.sizes.append(tokens)
        target_s = self.fixed_s + tokens * self.token_s + 1e-9 * context_len * tokens
        self.speculator.proposed_for, self.speculator.proposal_s = min(tokens, self.max_num_reqs), target_s / 100
        self.now += target_s * 1.01
        return range(tokens), None


def measured(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(start_costs.time, "perf_counter", lambda: runner.now)
    return start_costs.start_costs(runner, SimpleNamespace(broadcast_object=lambda given, src=0: given))


def test_every_size_on_a_fast_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(0.001, 0.00001)
    costs = measured(runner, monkeypatch)
    assert {*runner.sizes} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048}
    assert costs.verify_s(1, 2048, 0)[[0, 99, 2047]] == pytest.approx([0.00101, 0.002, 0.02148], rel=0.01)
    assert costs.draft_s(8, 0) == pytest.approx(0.0000108, rel=0.01)
    assert runner.now < start_costs.HOST.seconds


def test_a_slow_machine_does_not_wait_for_large_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(0.02, 0.01)
    costs = measured(runner, monkeypatch)
    assert runner.now < 2 * start_costs.HOST.seconds and max(runner.sizes) < 64
    assert costs.verify_s(1, 2048, 0)[[0, 7, 2047]] == pytest.approx([0.03, 0.1, 20.5], rel=0.01)


def test_two_sizes_on_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(2.0, 0.5)
    costs = measured(runner, monkeypatch)
    assert runner.sizes == [1, 1, 8], "the first is not counted"
    assert costs.verify_s(100, 100, 0)[0] == pytest.approx(52.0, rel=0.01)
