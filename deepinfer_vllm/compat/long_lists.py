"""Sampling parameters with lists longer than runner V2 has room for, refused: its worker raises, which ends engines."""

import functools
from typing import Any


def refuse_what_workers_cannot_hold() -> None:
    """Answer a request whose lists of tokens runner V2 could not keep with status 400, as vLLM does other bad values.

    vLLM looks at their lengths in the worker only, in the middle of a step.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    if hasattr(process, "deepinfer_hooked"):
        return

    @functools.wraps(process)
    def process_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        if request.sampling_params is not None and self.vllm_config.use_v2_model_runner:
            _check(request.sampling_params)
        return request

    process_and_check.deepinfer_hooked = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_and_check


def _check(params: Any) -> None:
    """Of parameters that are whole: end tokens and words by token are in them."""
    from vllm import envs
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample import logit_bias as room

    words = params.bad_words_token_ids or []
    for name, count, most in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), room.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), room.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids", len(params.all_stop_token_ids) if params.min_tokens else 0, room.MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words", len(words), envs.VLLM_MAX_NUM_BAD_WORDS),
        ("bad_words", sum(map(len, words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if count > most:
            raise VLLMValidationError(
                f"{name} comes to {count} entries, at most {most} fit here: send fewer", parameter=name, value=count
            )
