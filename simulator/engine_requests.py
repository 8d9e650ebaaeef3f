"""From the body of each generating API to what the mock engine has to do: prompts as token ids, limits, form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_instance import instance

IMAGE_TOKENS = 16
"""Of one picture or sound."""


class Refused(Exception):
    """The request is answered with this status and message instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(slots=True)
class Job:
    """One request to generate."""

    api: str
    """chat, completion, responses, messages or generate."""
    model: str
    prompts: list[list[int]]
    max_tokens: int
    stream: bool = False
    n: int = 1
    include_usage: bool = False
    return_token_ids: bool = False
    output_mode: str = "tokens"
    """Of generate: tokens or text."""
    logprobs: bool = False
    ignore_end: bool = False
    salt: str = ""
    priority: int = 0
    kv: dict[str, Any] | None = None
    tool: dict[str, Any] | None = None
    """Function of the tool that is called: name and parameters."""
    said: list[int] | None = None
    """The answer, where its form is prescribed; else it follows from the prompt."""
    images: list[str] = field(default_factory=list)


def read(api: str, body: Any, config: EngineConfig) -> Job:
    """Raises Refused for what vLLM refuses too."""
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    model = body.get("model") or config.models[0]
    if model not in config.models:
        raise Refused(404, f"The model `{model}` does not exist.")
    images: list[str] = []
    if api == "generate":
        sampling = body.get("sampling_params") or {}
        prompts, limit = [list(body.get("token_ids") or [])], sampling.get("max_tokens", config.default_max_tokens)
    else:
        sampling = body
        prompts = _prompts(api, body, images)
        limit = body.get("max_completion_tokens") or body.get("max_output_tokens") or body.get("max_tokens")
    limit = config.default_max_tokens if limit is None else limit
    for prompt in prompts:
        if not prompt:
            raise Refused(400, "the prompt is empty")
        if len(prompt) + limit > config.max_model_tokens:
            raise Refused(
                400,
                f"This model's maximum context length is {config.max_model_tokens} tokens. However, you requested "
                f"{limit} output tokens and your prompt contains {len(prompt)} input tokens.",
            )
    if limit < 1:
        raise Refused(400, f"max_tokens must be at least 1, got {limit}.")
    job = Job(
        api,
        model,
        prompts,
        limit,
        stream=bool(body.get("stream")),
        n=sampling.get("n") or 1,
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        return_token_ids=bool(body.get("return_token_ids")),
        output_mode=body.get("output_mode") or "tokens",
        logprobs=sampling.get("logprobs") not in (None, False),
        ignore_end=bool(sampling.get("ignore_eos")),
        salt=body.get("cache_salt") or "",
        priority=body.get("priority") or 0,
        kv=body.get("kv_transfer_params"),
        images=images,
    )
    _prescribe(job, body)
    return job


def _prompts(api: str, body: dict[str, Any], images: list[str]) -> list[list[int]]:
    given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if given and not images:
        return [list(given)]
    if api == "completion":
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return [tokens.encode(prompt)]
        if not isinstance(prompt, list) or not prompt:
            raise Refused(400, "Either prompt or prompt_embeds must be provided and non-empty.")
        if isinstance(prompt[0], int):
            return [prompt]
        return [tokens.encode(one) if isinstance(one, str) else list(one) for one in prompt]
    messages = body.get("input") if api == "responses" else body.get("messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages: Field required")
    if before := body.get("system") or body.get("instructions"):
        messages = [{"role": "system", "content": before}, *messages]
    return [chat_prompt(messages, body.get("tools"), images)]


def chat_prompt(messages: list[Any], tools: Any = None, images: list[str] | None = None) -> list[int]:
    """BOS, tools, then of each message its role and text; at the end the assistant's turn. Pictures go to `images`."""
    ids = [tokens.BOS]
    if tools:
        ids += [tokens.TOOL, *tokens.encode(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS).decode())]
    for message in messages:
        role = message.get("role") or message.get("type")
        ids.append(tokens.ROLES.get(role, tokens.TOOL))
        content = message.get("content")
        if content is None:
            content = message.get("output") or message.get("arguments") or ""
        ids += _content(content, images)
        if calls := message.get("tool_calls"):
            ids += tokens.encode(orjson.dumps(calls).decode())
    return [*ids, tokens.ASSISTANT]


def _content(content: Any, images: list[str] | None) -> list[int]:
    if isinstance(content, str):
        return tokens.encode(content)
    ids: list[int] = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            ids += tokens.encode(part)
        elif "text" in part:
            ids += tokens.encode(part["text"])
        elif part.get("type") in ("image_url", "input_image", "image", "input_audio", "video_url"):
            if images is not None:
                images.append(orjson.dumps(part).decode())
            ids += [tokens.IMAGE] * IMAGE_TOKENS
        else:
            ids += tokens.encode(orjson.dumps(part).decode())
    return ids


def _prescribe(job: Job, body: dict[str, Any]) -> None:
    """A tool call or a structured answer, where the request demands one."""
    choice = body.get("tool_choice")
    functions = [_function(tool) for tool in body.get("tools") or ()]
    name = (choice.get("function") or choice).get("name") if isinstance(choice, dict) else None
    forced = choice in ("required", "any") or (
        isinstance(choice, dict) and choice.get("type") in ("any", "function", "tool")
    )
    if functions and forced:
        job.tool = next((function for function in functions if function["name"] == name), functions[0])
        job.said = tokens.encode(orjson.dumps(instance(job.tool["parameters"])).decode())
        return
    shape = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    outputs = body.get("structured_outputs") or {}
    schema = (
        (shape.get("json_schema") or shape).get("schema") if shape.get("type") == "json_schema" else outputs.get("json")
    )
    if schema is not None:
        schema = orjson.loads(schema) if isinstance(schema, str) else schema
        job.said = tokens.encode(orjson.dumps(instance(schema)).decode())
    elif shape.get("type") == "json_object":
        job.said = tokens.encode("{}")
    elif outputs.get("choice"):
        job.said = tokens.encode(outputs["choice"][0])


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {
        "name": function.get("name", ""),
        "parameters": function.get("parameters") or function.get("input_schema") or {},
    }
