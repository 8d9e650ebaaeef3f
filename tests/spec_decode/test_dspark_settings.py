"""What the environment and vLLM's flags ask of DSpark, and what this engine allows of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_vllm.spec_decode.settings import Settings, trimming_problems

BUDGET = "DEEPINFER_VLLM_DSPARK_BUDGET"


def engine(**changes: Any) -> SimpleNamespace:
    """The part of a VllmConfig that settings look at."""
    ranks = {f"{kind}_parallel_size": 1 for kind in ("data", "pipeline", "decode_context", "prefill_context")}
    parallel = {**ranks, "enable_batch_sharded_sampling": False}
    fields: dict[str, Any] = {
        "parallel_config": SimpleNamespace(**{**parallel, **{k: v for k, v in changes.items() if k in parallel}}),
        "lora_config": changes.get("lora_config"),
        "model_config": SimpleNamespace(return_sampling_mask=changes.get("return_sampling_mask", False)),
        "aux_output_config": SimpleNamespace(enabled=changes.get("enabled", False)),
    }
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("asked", "current", "form"),
    [
        (None, True, "early-stop"),
        ("auto", False, "delayed"),
        ("delayed", True, "delayed"),
        ("early-stop", True, "early-stop"),
        ("fixed", True, "fixed"),
        ("fixed", False, "fixed"),
    ],
)
def test_form(asked: str | None, current: bool, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BUDGET, raising=False)
    if asked is not None:
        monkeypatch.setenv(BUDGET, asked)
    assert Settings.read(current=current).form == form


def test_early_stop_needs_current_confidences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUDGET, "early-stop")
    with pytest.raises(ValueError, match=f"{BUDGET}=early-stop needs .*Set it to auto or delayed"):
        Settings.read(current=False)


def test_the_rest_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CALIBRATION": "off", "RECORD": "/a/file", "GRAMMAR": "0"}.items():
        monkeypatch.setenv(f"DEEPINFER_VLLM_DSPARK_{name}", value)
    settings = Settings.read(current=True)
    assert (settings.calibration, settings.record, settings.grammar) == ("off", "/a/file", False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        ({"data_parallel_size": 2}, ["--data-parallel-size=2"]),
        ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size=2"]),
        ({"decode_context_parallel_size": 2}, ["context parallelism"]),
        ({"enable_batch_sharded_sampling": True}, ["--enable-batch-sharded-sampling"]),
        ({"lora_config": object()}, ["--enable-lora"]),
        ({"return_sampling_mask": True}, ["--return-sampling-mask"]),
        ({"enabled": True}, ["--enable-return-routed-experts"]),
    ],
)
def test_what_asks_for_every_draft(changes: dict[str, Any], named: list[str]) -> None:
    assert trimming_problems(engine(**changes)) == named


def drafting(method: str = "dspark", *, adaptive: bool = True) -> Any:
    speculative = SimpleNamespace(method=method, enable_adaptive_verification=adaptive)
    graphs = SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False))
    return SimpleNamespace(
        **{**vars(engine()), "speculative_config": speculative, "compilation_config": graphs, "attention_config": None}
    )


class TestFlagsOfVllm:
    """Through the shims, on a CPU."""

    @pytest.fixture(autouse=True)
    def shims(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("vllm")
        from deepinfer_vllm.compat import provide_dspark

        monkeypatch.delenv(BUDGET, raising=False)
        provide_dspark()

    def test_adaptive_verification_needs_no_graphs(self) -> None:
        from vllm.config import VllmConfig

        config = drafting()
        VllmConfig._validate_adaptive_verification(config)
        assert config.speculative_config.enable_adaptive_verification is False

    def test_it_contradicts_a_fixed_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.config import VllmConfig

        monkeypatch.setenv(BUDGET, "fixed")
        with pytest.raises(
            ValueError, match=f"enable_adaptive_verification=true .* {BUDGET}=fixed .*Leave one of them"
        ):
            VllmConfig._validate_adaptive_verification(drafting())

    def test_other_methods_are_vllms(self) -> None:
        from vllm.config import VllmConfig

        with pytest.raises(ValueError, match="requires full CUDA graphs"):
            VllmConfig._validate_adaptive_verification(drafting("eagle"))

    @pytest.mark.parametrize(
        ("fields", "warned"), [({"dspark_block_size": 5}, False), ({"dspark_block_size": 7}, True), ({}, False)]
    )
    def test_blocks_of_another_length(
        self, fields: dict[str, int], warned: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from deepinfer_vllm.spec_decode import start

        said: list[str] = []
        monkeypatch.setattr(start.logger, "warning", lambda text, *values: said.append(text % values))
        hf = SimpleNamespace(**fields)
        start.warn_of_another_block(
            SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf), num_speculative_steps=5)
        )
        assert len(said) == warned
        for text in said:
            assert text.startswith("num_speculative_tokens=5, but the draft model was trained for blocks of 7, ")
            assert text.endswith("Set it to 7.")

    def test_what_cannot_have_a_budget_verifies_every_draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from deepinfer_vllm.spec_decode import start

        said: list[str] = []
        monkeypatch.setattr(start.logger, "warning", lambda text, *values: said.append(text % values))
        ranks = SimpleNamespace(broadcast_object=lambda given, src=0: given)
        device, now = torch.device("cpu"), lambda: 0.0
        lora = SimpleNamespace(vllm_config=engine(lora_config=object()))
        assert start.affordable_costs(lora, ranks) is None
        broken = SimpleNamespace(
            vllm_config=engine(),
            device=device,
            max_num_tokens=8,
            max_num_reqs=2,
            max_model_len=16,
            speculator=SimpleNamespace(now=now),
            _dummy_run=lambda *_, **__: 1 / 0,
        )
        assert start.affordable_costs(broken, ranks) is None
        assert len(said) == 2 and all(f"{BUDGET}=fixed" in text and "\n" not in text for text in said)
        assert "--enable-lora" in said[0] and "ZeroDivisionError" in said[1]

    @pytest.mark.parametrize(("chosen", "v2"), [(None, True), (True, True), (False, False)])
    def test_runner_v2_unless_another_is_chosen(
        self, chosen: bool | None, v2: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm import envs
        from vllm.config import VllmConfig

        monkeypatch.setattr(envs, "VLLM_USE_V2_MODEL_RUNNER", chosen, raising=False)
        config = drafting()
        config.attention_config = SimpleNamespace(hisparse_config=None)
        assert VllmConfig.use_v2_model_runner.fget(config) is v2
