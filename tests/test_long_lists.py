"""Requests with lists, seeds and lengths that workers have no room for."""

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
    model_config = SimpleNamespace(max_model_len=512)
    return SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=v2, model_config=model_config))


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


@pytest.mark.parametrize("v2", [True, False])
def test_seeds_are_numbers_of_64_bits(process: Any, v2: bool) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    least, most = -(1 << 63), (1 << 63) - 1 if v2 else (1 << 64) - 1  # torch takes more than an array does
    for seed in (None, 0, least, most):
        assert process(engine(v2=v2), SamplingParams(seed=seed)).sampling_params.seed == seed
    for seed in (least - 1, most + 1):
        with pytest.raises(VLLMValidationError, match=f"seed={seed} must be {least} to {most}: "):
            process(engine(v2=v2), SamplingParams(seed=seed))
    process(engine(v2=v2), SamplingParams(seed=most - 2, n=3))
    with pytest.raises(VLLMValidationError, match=f"seed={most - 1} must be {least} to {most - 2} for n=3: "):
        process(engine(v2=v2), SamplingParams(seed=most - 1, n=3))


def test_no_answer_is_longer_than_the_model(process: Any) -> None:
    """V2 adds the prompt's to them, in 32 bits."""
    from vllm import SamplingParams

    for given, kept in ((1 << 40, 512), (513, 512), (512, 512), (7, 7)):
        params = process(engine(), SamplingParams(max_tokens=given, min_tokens=given)).sampling_params
        assert (params.max_tokens, params.min_tokens) == (kept, kept)
    params = process(engine(v2=False), SamplingParams(max_tokens=1 << 40)).sampling_params
    assert params.max_tokens == 1 << 40
