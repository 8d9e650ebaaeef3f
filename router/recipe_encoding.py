"""Makes tokens of a conversation as DeepSeek's API does, with deepseek-recipe, and has the engine take them.

vLLM 0.32 uses `kv_transfer_params.prompt_token_ids` of a chat, responses or messages request instead of encoding its
messages, and does all else as ever: its answer is a chat answer. It ignores them where messages have images.
"""

import json
import logging
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from deepseek_recipe import (
    ChatCompletionRequest,
    Conversation,
    ConversionError,
    ConversionOptions,
    DeepseekV41Encoding,
    MessagesRequest,
    ModelVersion,
    ResponsesRequest,
    SpecialTokens,
    Tokenizer,
)

from deepinfer_router.api import Kind
from deepinfer_router.errors import Refusal, RouterConfigError
from deepinfer_router.recipe_config import RecipeConfig
from deepinfer_router.text_tokens import TextTokens
from deepinfer_router.tokenizer_process import TokenizerProcesses

logger = logging.getLogger(__name__)

LONG_CHARS = 32 << 10
"""Texts of so many are encoded by another process."""
_AT_ONCE = 16 << 10
"""Tokens that become objects without another thread between: about 0.4 ms."""

MODEL = "model"
"""What every request to recipe calls its model: names are the router's affair."""

IMAGE = "<｜deepseek_image｜>"
"""How V4.1 spells an image: not recipe's default. Conversations with images are the engine's to encode."""

SAMPLE = {
    "messages": [
        {"role": "system", "content": "Take 3 steps:\n\n\t1. don't  hurry\r\n"},
        {
            "role": "user",
            "content": "naïve café — 你好，мир 🙂 1234567 <｜User｜> <think> ｜DSML｜ " + "x = [1,2]; " * 30,
        },
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": " why not ",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "b"]}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
}
"""What a tokenizer is tried with."""

# What the tokens depend on. Recipe sees nothing else, and so refuses nothing else.
_FIELDS = {
    Kind.CHAT: ("messages", "tools", "tool_choice", "thinking", "reasoning_effort", "response_format"),
    Kind.RESPONSES: ("input", "instructions", "tools", "tool_choice", "reasoning", "text"),
    Kind.MESSAGES: ("messages", "system", "tools", "tool_choice", "thinking", "output_config"),
}
_REQUESTS = {Kind.CHAT: ChatCompletionRequest, Kind.RESPONSES: ResponsesRequest, Kind.MESSAGES: MessagesRequest}

_ENGINES_OWN = ("chat_template", "documents", "echo", "continue_final_message", "previous_input_messages")
"""Fields of vLLM by which it encodes otherwise than recipe can."""


class Encoded(NamedTuple):
    """A conversation in tokens."""

    token_ids: list[int]
    as_json: bytes
    """The same."""
    thinking: bool
    """Whether the prompt opens reasoning."""
    strict_tools: dict[str, Any]
    """Parameters of strict tools by name, as the prompt has them."""


def why_not_encoded(kind: Kind, fields: dict[str, Any]) -> str:
    """Why the engine has to encode this one itself, in a fixed word; empty: recipe can."""
    if kind not in _FIELDS:
        return "api"
    if fields.get("previous_response_id"):
        return "previous_response"
    if any(fields.get(name) for name in _ENGINES_OWN) or fields.get("add_generation_prompt") is False:
        return "template"
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        choice = choice.get("type")
    if choice not in (None, "auto", "none"):
        return "tool_choice"  # recipe opens the call in the prompt, vLLM has the answer constrained
    return ""


class RecipeEncoder:
    """Encodes conversations. Thread-safe; a megabyte of new text takes half a second, without the interpreter lock."""

    def __init__(self, config: RecipeConfig) -> None:
        """Raises RouterConfigError: no tokenizer, or none with which V4.1's prompts can be encoded."""
        document = _read(config.tokenizer)
        special = SpecialTokens(image=IMAGE)
        self._special = {one["content"]: one["id"] for one in document.get("added_tokens", ())}
        self._encoding = DeepseekV41Encoding().with_special_tokens(special)
        self._options = (
            ConversionOptions(default_thinking_mode=config.thinking)
            .with_special_tokens(special)
            .with_model_versions_by_name({MODEL: ModelVersion.DeepseekV41Flash})
        )
        try:
            # The text between special tokens is encoded without them: so their spelling in it stays text.
            plain = json.dumps({**document, "added_tokens": []})
            self._plain = Tokenizer.from_str(plain)
            self._beside = TokenizerProcesses(plain.encode())
            self._texts = TextTokens(self._encode, config.cache_bytes)
            whole = self._encoding.with_tokenizer(Tokenizer.from_str(json.dumps(document)))
            conversation = self._convert(Kind.CHAT, SAMPLE)
            expected = whole.encode(conversation)
        except RuntimeError as error:
            raise RouterConfigError(
                f"entry.recipe.tokenizer: {config.tokenizer} does not fit V4.1: {error}: give its tokenizer.json"
            ) from error
        if self._tokens(conversation, "") != expected:
            raise RouterConfigError(
                f"entry.recipe.tokenizer: {config.tokenizer} encodes text otherwise in parts than as a whole: "
                "set entry.encoding to engine"
            )

    @property
    def cache_bytes(self) -> int:
        """About what is remembered now."""
        return self._texts.held_bytes

    def encode(self, kind: Kind, fields: dict[str, Any], salt: str = "") -> Encoded:
        """The tokens of a conversation, of an API that `why_not_encoded` has nothing against.

        Raises:
            Refusal: 400, DeepSeek's API would refuse it.
        """
        conversation = self._convert(kind, fields)
        ids = self._tokens(conversation, salt)
        strict = {tool.name: tool.parameters for tool in conversation.tools if tool.strict}
        return Encoded(ids, _as_json(ids), conversation.thinking_mode, strict)

    def close(self) -> None:
        """What is being encoded is still encoded."""
        self._beside.close()

    def _encode(self, text: str) -> "list[int] | array[int]":
        if len(text) >= LONG_CHARS:
            try:
                return self._beside.encode(text)
            except OSError as error:
                logger.warning("a long text is encoded here, which holds others up: no process to do it: %s", error)
        tokens: list[int] = self._plain.encode(text)
        return tokens

    def _convert(self, kind: Kind, fields: dict[str, Any]) -> Conversation:
        asked = {name: fields[name] for name in _FIELDS[kind] if name in fields}
        asked["model"] = MODEL
        if kind is Kind.MESSAGES:
            asked["max_tokens"] = 1
        _take_template_kwargs(kind, fields.get("chat_template_kwargs"), asked)
        try:
            return _REQUESTS[kind](orjson.dumps(asked)).convert(self._options).conversation
        except ConversionError as error:
            raise Refusal(error.status_code, "not_encodable", str(error)) from error
        except (ValueError, orjson.JSONEncodeError) as error:
            raise Refusal(400, "not_encodable", str(error)) from error

    def _tokens(self, conversation: Conversation, salt: str) -> list[int]:
        rendered = self._encoding.render_conversation(conversation)
        prompt: str = rendered.prompt
        ids: list[int] = []
        at = 0
        for start, end in rendered.special_ranges:
            if at < start:
                _append(ids, self._texts.tokens(prompt[at:start], salt))
            token = self._special.get(prompt[start:end])
            if token is None:
                raise Refusal(400, "not_encodable", f"the model has no token {prompt[start:end]!r}, which this needs")
            ids.append(token)
            at = end
        if at < len(prompt):
            _append(ids, self._texts.tokens(prompt[at:], salt))
        return ids


def _append(ids: list[int], more: "list[int] | array[int]") -> None:
    for at in range(0, len(more), _AT_ONCE):
        ids += more[at : at + _AT_ONCE]


def _as_json(ids: list[int]) -> bytes:
    pieces = (orjson.dumps(ids[at : at + _AT_ONCE])[1:-1] for at in range(0, len(ids), _AT_ONCE))
    return b"[%b]" % b",".join(pieces)


def _take_template_kwargs(kind: Kind, kwargs: Any, asked: dict[str, Any]) -> None:
    """vLLM's way to say whether, and how much, to think, where the API's own is not used."""
    if not isinstance(kwargs, dict):
        return
    says = [bool(kwargs[name]) for name in ("thinking", "enable_thinking") if name in kwargs]
    effort = kwargs.get("reasoning_effort")
    if kind is Kind.RESPONSES:
        if says and not any(says):
            asked.setdefault("reasoning", {"effort": "none"})
        elif effort is not None:
            asked.setdefault("reasoning", {"effort": effort})
        return
    if says and "reasoning_effort" not in asked:
        asked.setdefault("thinking", {"type": "enabled" if any(says) else "disabled"})
    if effort is not None and kind is Kind.CHAT:
        asked.setdefault("reasoning_effort", effort)


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        raise RouterConfigError("entry.recipe.tokenizer: missing: `encoding: recipe` needs the tokenizer.json")
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        document = orjson.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RouterConfigError(f"entry.recipe.tokenizer: {file} cannot be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("added_tokens", []), list):
        raise RouterConfigError(f"entry.recipe.tokenizer: {file} is no tokenizer.json")
    return document
