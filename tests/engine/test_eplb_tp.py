"""Two tensor-parallel processes whose experts vLLM's EPLB moves while they answer: the tokens and logits of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.eplb import trace
from engine.cpu_eplb import LB_STEPS, eplb_on_cpu
from engine.harness import Engine, golden_prompts
from engine.test_dspark import COUNT, make_case, start

LIMIT = 5e-5  # float32, sums in another order
NAME = "v41-tiny-a-fp8"
"""Its experts are held as codes and scales, which move as bytes."""
BALANCED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "disable_log_stats": False,
}
MOST_ROUNDS = 12


@pytest.fixture(autouse=True)
def shims(tmp_path: Path) -> Iterator[None]:
    with eplb_on_cpu(tmp_path):
        yield


def told(backend: EngineBackend) -> dict[str, float]:
    """EPLB's metrics without their prefix."""
    prefix = "vllm:deepinfer_eplb_"
    return {m.name.removeprefix(prefix): m.value for m in backend._llm.get_metrics() if m.name.startswith(prefix)}


def test_asynchronous(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_EPLB_RECORD", str(tmp_path / "loads.npz"))
    prompts = golden_prompts(NAME)
    eplb = {"window_size": 8, "step_interval": 12, "num_redundant_experts": 2}
    with engine(NAME, eplb_config=eplb, max_num_batched_tokens=300, **BALANCED) as backend:
        for _ in range(MOST_ROUNDS):
            answers = backend.generate_many([p.input_ids.tolist() for p in prompts], len(prompts[0].gen_ids))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.ids == prompt.gen_ids.tolist()
                assert (answer.logits - prompt.gen_logits).abs().max() <= LIMIT
            values = told(backend)
            if values.get("moe_lb") and values["rebalances"] >= 2:
                break
    assert values["rebalances"] >= 2 and values["moved_experts"] >= 1 and not values["failed_decisions"]
    assert values["moved_bytes"] % values["moved_experts"] == 0
    assert 1 <= values["moe_lb"] <= 2 and values["slowest_rank_tokens"] >= values["mean_rank_tokens"] > 0
    recorded = trace.read(tmp_path / "loads.npz")
    assert len(recorded.counts) % LB_STEPS == 0 and recorded.counts.shape[1:] == (8, 8)
    assert (recorded.meta["ranks"], recorded.meta["physical"]) == (2, 10)
    # Two experts a token and layer, and both ranks count each token.
    assert set((recorded.counts.sum(axis=2) % 4).ravel().tolist()) == {0}


def test_drafts_with_experts_of_another_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's 8 move; the draft layers' 4 stay. Also: runner V2, and a bound on what moves."""
    monkeypatch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", "fixed")
    monkeypatch.setenv("DEEPINFER_VLLM_EPLB_MAX_MIGRATION", "100K")
    case = make_case(tmp_path)
    eplb = {"window_size": 8, "step_interval": 8, "num_redundant_experts": 2, "use_async": False}
    backend = start(case, eplb_config=eplb, **BALANCED)
    try:
        for _ in range(MOST_ROUNDS):
            answers = backend.generate_many(case.prompts, COUNT, logits=False)
            assert [answer.ids for answer in answers] == case.answers
            values = told(backend)
            if values["rebalances"] >= 3 and values["moved_experts"]:
                break
        accepted = sum(m.value for m in backend._llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    finally:
        backend.close()
    assert accepted and values["moved_experts"]
    assert values["moved_bytes"] <= 100 * 2**10 * values["rebalances"]
