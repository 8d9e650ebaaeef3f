"""Sampling parameters that workers have no room for: they raise, which ends engines.

Lists too long for runner V2, seeds that are no 64-bit numbers, and lengths that are no 32-bit ones.
"""

import functools
from typing import Any

_V1_SEEDS, _V2_SEEDS = range(-(1 << 63), 1 << 64), range(-(1 << 63), 1 << 63)


def refuse_what_workers_cannot_hold() -> None:
    """Answer a request whose lists of tokens runner V2 could not keep, or whose seed no runner, with status 400, as
    vLLM does other bad values. `max_tokens` and `min_tokens` beyond the model's length are that: so they end anyway.

    vLLM looks at lengths of lists in the worker only, in the middle of a step; at numbers where they come as JSON of
    OpenAI's API, and nowhere if they come by `LLM` or with the tokens; nowhere at the seeds of several answers.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    if hasattr(process, "deepinfer_hooked"):
        return

    @functools.wraps(process)
    def process_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        if (params := request.sampling_params) is not None:
            v2 = self.vllm_config.use_v2_model_runner
            _check_seeds(params.seed, params.n, _V2_SEEDS if v2 else _V1_SEEDS)
            if v2:
                _check_lists(params)
                most = self.vllm_config.model_config.max_model_len
                params.max_tokens, params.min_tokens = min(params.max_tokens, most), min(params.min_tokens, most)
        return request

    process_and_check.deepinfer_hooked = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_and_check


def _check_seeds(seed: int | None, answers: int, known: range) -> None:
    """Each answer has the next one."""
    from vllm.exceptions import VLLMValidationError

    if seed is not None and (seed not in known or seed + answers - 1 not in known):
        most = known[-1] - answers + 1
        more = f" for n={answers}" if answers > 1 else ""
        raise VLLMValidationError(
            f"seed={seed} must be {known[0]} to {most}{more}: send another", parameter="seed", value=seed
        )


def _check_lists(params: Any) -> None:
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
