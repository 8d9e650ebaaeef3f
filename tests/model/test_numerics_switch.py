"""DEEPINFER_VLLM_NUMERICS reaches every layer of a model, and is named when its value is not allowed."""

from pathlib import Path

import pytest

from deepinfer_vllm.checkpoint import golden
from topologies import bare_model

DIRECTORY = Path(__file__).resolve().parent.parent / "golden" / "v41-tiny-a"


@pytest.mark.parametrize("value, kind", [(None, "plain"), ("plain", "plain"), ("qat", "qat")])
def test_the_variable_decides(value: str | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("DEEPINFER_VLLM_NUMERICS", value)
    values, other = golden.read(DIRECTORY).values, "qat" if kind == "plain" else "plain"
    right, wrong = values[kind].prompts[3].logits_last8, values[other].prompts[3].logits_last8
    assert right is not None and wrong is not None
    with bare_model(DIRECTORY) as model:
        assert {layer.attn.numerics.quantised for layer in model.model.layers} == {kind == "qat"}
        logits = model.prefill(values[kind].prompts[3].input_ids).logits[-8:]
    assert float((logits - right).square().mean().sqrt() / right.std()) < 1e-2
    assert float((logits - wrong).square().mean().sqrt() / wrong.std()) > 1e-2


def test_a_value_that_is_not_allowed_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_NUMERICS", "fp4")
    message = r"DEEPINFER_VLLM_NUMERICS='fp4': the value must be plain or qat"
    with pytest.raises(ValueError, match=message), bare_model(DIRECTORY):
        pass
