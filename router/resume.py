"""How another engine is asked to go on with an answer: its prompt is the prompt and what the client has of the answer.

Only where the result is the one stream that the client asked for; else a reason, and the client gets an error event.
"""

from collections.abc import Mapping
from typing import Any

from deepinfer_router.api import Kind
from deepinfer_router.body_patch import DROP
from deepinfer_router.transcript import Transcript

KINDS = frozenset((Kind.CHAT, Kind.COMPLETION, Kind.GENERATE))
"""APIs of vLLM 0.32 that say token ids within a stream and take them as a prompt."""
COMPLETION_TOKENS = 16
"""vLLM's bound of a completion that gives none."""
REASONING_ENDS = frozenset(("</think>",))
"""What may stand between reasoning and content, white space aside."""
TAIL_CHARS = 40
"""Longer than what a parser holds back to see whether it is a marker."""
_DETOKENIZED_SPACE = " "
"""Some tokenizers put one before a text, others take one from it."""


def why_not_now(kind: Kind, transcript: Transcript, *, shows_ids: bool) -> str:
    """Why a stream that could be resumed cannot be at this point: a fixed word; empty: it can."""
    if not transcript.prompt_ids:
        return "no_token_ids"
    if kind is not Kind.GENERATE and shows_ids and transcript.told < len(transcript.ids):
        return "ids_without_text"
    return ""


def hop_changes(kind: Kind) -> dict[str, Any]:
    """What a stream's body has, so that it can be resumed."""
    return {} if kind is Kind.GENERATE else {"return_token_ids": True}


def resumed_changes(
    kind: Kind, fields: Mapping[str, Any], transcript: Transcript, max_tokens: int | None
) -> dict[str, Any]:
    """Changes of the body that asks another engine to go on. `max_tokens`: the client's bound, None if it gave none.

    After `transcript.rewind()`.
    """
    done = len(transcript.ids)
    ids = (transcript.prompt_ids or []) + transcript.ids
    if kind is Kind.GENERATE:
        sampling = dict(fields.get("sampling_params") or {})
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens - done
        _lower_minimum(sampling, sampling, done)
        return {"token_ids": ids, "sampling_params": sampling}
    changes: dict[str, Any] = {"return_token_ids": True}
    if kind is Kind.COMPLETION:
        changes["prompt"] = ids
        changes["max_tokens"] = (COMPLETION_TOKENS if max_tokens is None else max_tokens) - done
        if "truncate_prompt_tokens" in fields:
            changes["truncate_prompt_tokens"] = DROP
    else:
        changes["kv_transfer_params"] = {"prompt_token_ids": ids}
        if max_tokens is not None:
            changes |= {name: max_tokens - done for name in ("max_completion_tokens", "max_tokens") if name in fields}
    _lower_minimum(fields, changes, done)
    return changes


def held_back(raw: str, reasoning: str, content: str) -> str | None:
    """What a chat's parser had taken in and not told: `raw` is the text of the tokens, the rest what the client has.

    None: it cannot be told, or is more than white space within reasoning, which alone can be given later: a parser
    drops it where reasoning ends and tells it where it goes on.
    """
    if not reasoning or not content:
        return _rest(raw, reasoning + content, bool(reasoning))
    raw, reasoning = raw.removeprefix(_DETOKENIZED_SPACE), reasoning.removeprefix(_DETOKENIZED_SPACE)
    if not raw.startswith(reasoning) or not raw.endswith(content):
        return None
    between = raw[len(reasoning) : len(raw) - len(content)]
    return "" if between.strip() in REASONING_ENDS else None


def held_after_tail(raw: str, tail: str, reasoning: bool) -> str | None:
    """The same of an answer's end alone, where markers before it do not matter: `raw` is the text of its tokens.

    What is held at its beginning and at its end would have to be the same text h with h + raw = tail + h, so that all
    three repeat one text. A tail that is longer than any marker and does not repeat itself excludes that.
    """
    if len(tail) < TAIL_CHARS or tail in (tail + tail)[1:-1]:
        return None
    return _rest(raw, tail, reasoning)


def _rest(raw: str, told: str, reasoning: bool) -> str | None:
    raw, told = raw.removeprefix(_DETOKENIZED_SPACE), told.removeprefix(_DETOKENIZED_SPACE)
    rest = raw[len(told) :] if raw.startswith(told) else None
    return rest if rest == "" or (rest and reasoning and rest.isspace()) else None


def _lower_minimum(fields: Mapping[str, Any], changes: dict[str, Any], done: int) -> None:
    minimum = fields.get("min_tokens")
    if isinstance(minimum, int) and minimum:
        changes["min_tokens"] = max(0, minimum - done)
