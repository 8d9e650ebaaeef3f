"""Requests that use what vLLM's sampler can do, one of each kind."""

from __future__ import annotations

from typing import Any

from engine.invariant import Asked, texts

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}
ENDS = {"ignore_eos": False, "max_tokens": 16}
DRAWN: dict[str, Any] = {"temperature": 0.9}

KINDS_OF_SAMPLING: dict[str, dict[str, Any]] = {
    "a schema": {"structured_outputs": {"json": SCHEMA}, **ENDS},
    "a regex, drawn": {"structured_outputs": {"regex": "(yes|no){3} [0-9]{6}"}, **DRAWN, "seed": 11, **ENDS},
    "a choice": {"structured_outputs": {"choice": ["perhaps so", "perhaps not", "never"]}, **ENDS},
    "a stop string": {"stop": ["e", "1"], "max_tokens": 16},
    "a stop token": {"stop_token_ids": list(range(100, 130)), "max_tokens": 16},
    "several answers": {"n": 3, **DRAWN, "seed": 12},
    "at least so many": {"min_tokens": 6, "stop_token_ids": list(range(100, 220)), "max_tokens": 9},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "penalties, drawn": {"presence_penalty": 0.5, "frequency_penalty": -0.2, **DRAWN, "seed": 13},
    "bad words": {"bad_words": ["a", "th", "=", "st er"]},
    "allowed tokens, drawn": {"allowed_token_ids": list(range(5, 300, 2)), **DRAWN, "seed": 14},
    "top-p": {"top_p": 0.8, **DRAWN, "seed": 15},
    "top-k": {"top_k": 7, **DRAWN, "seed": 16},
    "every logprob": {"logprobs": -1, **DRAWN, "seed": 17},
    "no logprobs but one": {"logprobs": 0, **DRAWN, "seed": 18},
    "logprobs of the prompt": {"prompt_logprobs": 5, "logprobs": 1},
    "every logprob of the prompt": {"prompt_logprobs": -1, "logprobs": 1, "max_tokens": 2},
}
UNLESS_DRAFTED: dict[str, dict[str, Any]] = {
    "a bias": {"logit_bias": {7: 4.0, 99: -100.0, 120: 2.5}},
    "min-p": {"min_p": 0.1, "temperature": 1.2, "seed": 19},
    "named logprobs": {"logprobs": None, "logprob_token_ids": [3, 77, 200, 201, 202]},
}
"""vLLM refuses the first two where there are drafts, and lists other tokens than the named in steps that judge some."""


def kinds(*, drafts: bool) -> list[Asked]:
    """After the prompts in turn, so that equal beginnings meet."""
    given = KINDS_OF_SAMPLING | ({} if drafts else UNLESS_DRAFTED)
    prompts = texts()
    return [
        ({"prompt": prompts[number % len(prompts)]}, {"logprobs": 2, **parameters})
        for number, parameters in enumerate(given.values())
    ]
