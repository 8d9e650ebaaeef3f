"""Which answers another engine could go on with, from the tokens that were sent so far."""

from typing import Any

from deepinfer_router.api import Api, Kind

_WHERE_SET = {
    # what is counted or matched over the tokens of an answer would begin anew
    "seed": "seed",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
    "logprob_token_ids": "logprobs",
    "structured_outputs": "structured_output",
    "stop": "stop",
    "stop_sequences": "stop",
    "bad_words": "stop",
    "frequency_penalty": "penalty",
    "presence_penalty": "penalty",
    "repetition_detection": "penalty",
    "thinking_token_budget": "thinking_budget",
    "use_beam_search": "beam_search",
    "echo": "echo",
    "suffix": "suffix",
    "prompt_embeds": "prompt_embeds",
    "tools": "tools",
    "functions": "tools",
    "background": "background",
    "previous_response_id": "previous_response",
}
"""Field, and the word for why a request with it is not resumable."""


def why_not_resumable(api: Api, fields: dict[str, Any]) -> str:
    """A fixed word; empty: it is resumable."""
    if not api.generates:
        return "no_answer_of_tokens"
    sampling = fields
    if api.in_sampling_params:
        inner = fields.get("sampling_params")
        sampling = inner if isinstance(inner, dict) else {}
    for each in (fields, sampling) if sampling is not fields else (fields,):
        for name, why in _WHERE_SET.items():
            if each.get(name):
                return why
        if each.get("seed") is not None:
            return "seed"
        if each.get("logprobs") is not None and each["logprobs"] is not False:
            return "logprobs"
        if each.get("repetition_penalty") not in (None, 1, 1.0):
            return "penalty"
    if sampling.get("n") not in (None, 1) or sampling.get("best_of") not in (None, 1):
        return "n"
    if is_structured(fields):
        return "structured_output"
    if api.kind is Kind.GENERATE and fields.get("output_mode") == "text":
        return "text_mode"  # ids come before the text of a character that is not whole, which would be lost
    if api.kind is Kind.COMPLETION:
        prompt = fields.get("prompt")
        return "several_prompts" if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else ""
    if has_media(fields):
        return "media"
    return ""


def is_structured(fields: dict[str, Any]) -> bool:
    """Whether the answer has to be of a form that is said outside of `structured_outputs`."""
    for where, name in (
        (fields, "response_format"),
        (fields.get("text"), "format"),
        (fields.get("output_config"), "format"),
    ):
        form = where.get(name) if isinstance(where, dict) else None
        if isinstance(form, dict) and form.get("type") != "text":
            return True
    return False


def has_media(fields: dict[str, Any]) -> bool:
    """Whether a conversation has parts that are not text."""
    if fields.get("features") or fields.get("content_parts"):
        return True
    return any(_media(fields.get(name)) for name in ("messages", "input", "system"))


TEXT_PARTS = (
    None,
    "text",
    "input_text",
    "output_text",
    "refusal",
    "message",
    "thinking",
    "redacted_thinking",
    "reasoning",
)
"""Types of content parts that are text, or hold such."""


def _media(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for part in value:
        if isinstance(part, dict):
            if part.get("type") not in TEXT_PARTS and "role" not in part:
                return True
            if _media(part.get("content")):
                return True
    return False
