"""The body of a request's prefill: the same prompt, one token, no stream.

What decides the prompt's tokens stays (messages, tools, tool_choice, response_format, salt, adapter, images), for
blocks are found by them; what only shapes the answer goes, for the answer is thrown away. Fields of vLLM 0.32.
"""

from collections.abc import Mapping
from typing import Any

from deepinfer_router.api import Api
from deepinfer_router.body_patch import DROP

SHAPES_ANSWER = (
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "logprobs",
    "top_logprobs",
    "structured_outputs",
    "return_token_ids",
    "thinking_token_budget",
)
STOPS = ("stop", "stop_token_ids", "stop_sequences")


def prefill_changes(api: Api, fields: Mapping[str, Any], *, never_stop: bool = False) -> dict[str, Any]:
    """Changes of the body's top-level fields. `never_stop`: the one token may be any, an end too, and is no end."""
    changes: dict[str, Any] = {}
    if "stream" in fields:
        changes["stream"] = False
    if "stream_options" in fields:
        changes["stream_options"] = DROP
    if api.in_sampling_params:
        given = fields.get("sampling_params")
        sampling = dict(given) if isinstance(given, Mapping) else {}
        for name, value in _sampling(api, sampling, never_stop).items():
            if value is DROP:
                sampling.pop(name, None)
            else:
                sampling[name] = value
        changes["sampling_params"] = sampling
    else:
        changes |= _sampling(api, fields, never_stop)
    return changes


def _sampling(api: Api, fields: Mapping[str, Any], never_stop: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {name: DROP for name in SHAPES_ANSWER if name in fields}
    bounds = [name for name in api.max_tokens if name in fields] or [api.max_tokens[-1]]
    changes |= dict.fromkeys(bounds, 1)
    if never_stop:
        changes |= {name: DROP for name in STOPS if name in fields}
        changes["ignore_eos"] = True
    return changes
