"""Requests with lists that runner V2's worker has no room for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_vllm import compat


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's last step before a request leaves for the engine, given its parameters."""
    compat.provide_torch_kernels()
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(InputProcessor, "process_inputs", lambda self, params: SimpleNamespace(sampling_params=params))
    compat.refuse_what_workers_cannot_hold()
    hooked: Any = InputProcessor.process_inputs
    compat.refuse_what_workers_cannot_hold()
    assert InputProcessor.process_inputs is hooked
    return hooked


def engine(*, v2: bool = True) -> Any:
    return SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=v2))


def words(count: int, tokens: int) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(bad_words=["x"])
    params._bad_words_token_ids = [[1] * tokens] * count
    return params


def test_as_many_as_fit(process: Any) -> None:
    from vllm import SamplingParams

    for params in (
        None,
        SamplingParams(allowed_token_ids=list(range(1024)), logit_bias=dict.fromkeys(range(1024), 1.0)),
        SamplingParams(stop_token_ids=list(range(128)), min_tokens=2),
        SamplingParams(stop_token_ids=list(range(500))),
        words(8, 128),
    ):
        assert process(engine(), params).sampling_params is params


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids comes to 1025 entries, at most 1024"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias comes to 1025 entries, at most 1024"),
        ({"stop_token_ids": list(range(129)), "min_tokens": 1}, "stop_token_ids comes to 129 entries, at most 128"),
    ],
)
def test_more_are_refused(process: Any, given: dict[str, Any], message: str) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    params = SamplingParams(**given)
    with pytest.raises(VLLMValidationError, match=message):
        process(engine(), params)
    assert process(engine(v2=False), params).sampling_params is params  # runner V1 has room


@pytest.mark.parametrize(("count", "tokens", "found"), [(129, 1, "129"), (8, 129, "1032")])
def test_words_by_number_and_by_tokens(process: Any, count: int, tokens: int, found: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=f"bad_words comes to {found} entries"):
        process(engine(), words(count, tokens))
