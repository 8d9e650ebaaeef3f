"""Which CUDA graphs vLLM plans where our budget decides, by vLLM's own planner; nothing is captured here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from deepinfer_vllm.compat.dspark import decide_by_our_rule, hook_runner
from deepinfer_vllm.compat.dspark_graphs import PLANNING

REQUESTS, DRAFTS = 64, 5
SIZES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 384]


def config(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, **speculative: Any) -> Any:
    asked = {"method": "dspark", "enable_adaptive_verification": False, **speculative}
    parallel = {
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 1,
        "enable_batch_sharded_sampling": False,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False, **asked),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(return_sampling_mask=False),
        aux_output_config=SimpleNamespace(enabled=False),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        lora_config=None,
    )


def manager(vllm_config: Any, refused: str | None = None, **given: Any) -> Any:
    """What the runner would hold while caches are made; `refused`: a backend that does not replay such steps."""
    asked = []

    def unsupported(groups: Any, engine: Any, most: int, checked_layer_names: Any) -> tuple[str, None] | None:
        asked.append((groups, most, checked_layer_names))
        return None if refused is None else (refused, None)

    module = SimpleNamespace(
        maybe_create_adaptive_verification_manager=lambda **_: "vLLM's",
        get_varlen_cudagraph_unsupported_backend=unsupported,
    )
    decide_by_our_rule(module)
    arguments = {
        "attn_groups": ["groups"],
        "req_states": SimpleNamespace(num_speculative_steps=DRAFTS),
        "num_bonus_tokens": 1,
        "target_layer_names": {"layer"},
        **given,
    }
    found = module.maybe_create_adaptive_verification_manager(vllm_config=vllm_config, **arguments)
    assert all(call == (["groups"], 1 + DRAFTS, {"layer"}) for call in asked)
    return found


def plan(monkeypatch: pytest.MonkeyPatch, *, any_number: bool) -> Any:
    """vLLM's plan of graphs, as if all were captured."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)
    ranks = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: ranks)
    made = cudagraph_utils.CudaGraphManager(
        config(),
        torch.device("cpu"),
        CUDAGraphMode.FULL_AND_PIECEWISE,
        decode_query_len=1 + DRAFTS,
        varlen_decode=any_number,
    )
    made._graphs_captured = True
    return made


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_VLLM_DSPARK_BUDGET", raising=False)


@pytest.mark.parametrize(
    ("requests", "tokens", "most", "alone"),
    [(60, 60, 1, False), (60, 200, 6, False), (16, 96, 6, True), (64, 384, 6, True)],
    ids=["no drafts", "some", "all of 16", "all of 64"],
)
def test_every_number_of_drafts_has_a_full_graph(
    requests: int, tokens: int, most: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alone`: by itself vLLM has one, too. `most`: tokens that the scheduler gave a request."""
    uniform = tokens // requests if tokens == requests * most else None
    for any_number in (True, False):
        found = plan(monkeypatch, any_number=any_number).dispatch(requests, tokens, uniform, 0, max_query_len=most)
        full = any_number or alone
        assert found.cg_mode == (CUDAGraphMode.FULL if full else CUDAGraphMode.PIECEWISE)
        assert found.num_tokens == min(size for size in SIZES if size >= tokens)


def test_a_batch_with_a_prompt_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(monkeypatch, any_number=True).dispatch(16, 60, None, 0, max_query_len=None)
    assert found.cg_mode == CUDAGraphMode.PIECEWISE


def test_our_budget_asks_for_them() -> None:
    assert manager(config()) is PLANNING
    assert manager(config(), additional_attn_cg_support=(AttentionCGSupport.ALWAYS, None)) is PLANNING


@pytest.mark.parametrize(
    ("vllm_config", "given", "budget"),
    [
        (config(CUDAGraphMode.NONE), {}, ""),
        (config(CUDAGraphMode.PIECEWISE), {}, ""),
        (config(), {"refused": "Uniform"}, ""),
        (config(), {"additional_attn_cg_support": (AttentionCGSupport.UNIFORM_BATCH, "More")}, ""),
        (config(), {}, "fixed"),
    ],
    ids=["no graphs", "pieces", "a backend", "another group", "every draft"],
)
def test_elsewhere_vllm_plans_as_it_does(
    vllm_config: Any, given: dict[str, Any], budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", budget)
    assert manager(vllm_config, **given) is None


def test_an_engine_that_cannot_trim_has_all_drafts_graphs() -> None:
    engine = config()
    engine.lora_config = object()
    assert manager(engine) is None


def test_other_methods_are_vllms() -> None:
    assert manager(config(method="eagle")) == "vLLM's"


def test_nothing_of_it_is_left_once_caches_are_made() -> None:
    class Runner:
        device, speculator = torch.device("cuda"), None

        def initialize_kv_cache(self) -> None:
            self.adaptive_verification: Any = PLANNING

        def execute_model(self) -> None: ...

        def take_draft_token_ids(self) -> None: ...

    hook_runner(SimpleNamespace(GPUModelRunner=Runner))
    runner = Runner()
    runner.initialize_kv_cache()
    assert runner.adaptive_verification is None
