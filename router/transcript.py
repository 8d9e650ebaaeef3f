"""What a stream has told its client so far: enough to go on with it on another engine, without a gap or a repeat.

The hop's body asks for `return_token_ids`; the ids are kept here and taken out of what the client sees, unless it asked
for them too. An engine's text lags behind its tokens, while a character is not whole or a parser is not sure, so a
stream goes on after the last token whose text the client has, and what came after it is generated again.
"""

import re
from typing import Any

from deepinfer_router.api import Kind
from deepinfer_router.sse_payload import DONE, parsed, payload, written

_IDS = re.compile(rb'"(prompt_token_ids|token_ids)":\[[0-9, ]*\]')
"""Keys only: within a string the quotes around such a word would be escaped."""


class Transcript:
    """Of one stream of one choice. `forward` is given each whole event of an engine, and says what the client gets."""

    __slots__ = (
        "_created",
        "_id",
        "_kind",
        "_model",
        "_reasoning_ids",
        "_shows_ids",
        "_text_kind",
        "base",
        "done",
        "failed",
        "finished",
        "held",
        "ids",
        "pieces",
        "prompt_ids",
        "reasoned",
        "rejoined",
        "thinking",
        "told",
        "usage_told",
    )

    def __init__(self, kind: Kind, *, shows_ids: bool, prompt_ids: list[int] | None = None) -> None:
        """`kind`: CHAT, COMPLETION or GENERATE. `shows_ids`: the client asked for token ids itself."""
        self._kind = kind
        self._shows_ids = shows_ids or kind is Kind.GENERATE
        self._text_kind = kind is not Kind.GENERATE
        self._id: Any = None
        self._created: Any = None
        self._model: Any = None
        self.prompt_ids: list[int] | None = prompt_ids
        self.ids: list[int] = []
        """Generated so far."""
        self.told = 0
        """How many of them the client has the text of."""
        self.base = 0
        """How many of them were there when the engine that now generates was asked."""
        self.reasoned = 0
        """How many of those before `base` came with reasoning: nearly what vLLM counts, steps of its parser."""
        self._reasoning_ids = 0
        self.thinking = True
        """An engine went on within reasoning."""
        self.pieces: list[tuple[int, str, bool]] = []
        """Of a chat's text what each event told: `told` after it, the text, and whether it is reasoning."""
        self.held = ""
        """White space within reasoning that a parser held back when its engine failed."""
        self.finished = False
        """The choice has its finish_reason."""
        self.usage_told = False
        self.done = False
        """The end mark came."""
        self.failed = False
        """The engine itself has said that it cannot go on."""
        self.rejoined = False

    def forward(self, event: bytes) -> bytes:
        """What the client gets of `event`: often the same bytes, sometimes nothing."""
        data = payload(event)
        chunk = parsed(data)
        if chunk is None:
            if data == DONE:
                self.done = True
            return event
        if "error" in chunk and "choices" not in chunk:
            # An engine whose core has died says so within the stream, and ends it as if it was whole.
            self.failed = True
            return b""
        if self._id is None:
            self._id, self._created, self._model = (chunk.get(name) for name in ("id", "created", "model"))
        if isinstance(chunk.get("prompt_token_ids"), list) and self.prompt_ids is None:
            self.prompt_ids = chunk["prompt_token_ids"]
        choices = chunk.get("choices")
        if choices and self.held:
            self._give_held(choices[0].get("delta") or {})
        shown = self._note(choices[0]) if choices else True
        if not choices and chunk.get("usage"):
            self.usage_told = True
        if self.rejoined:
            return self._rewritten(chunk) if shown and not self._repeats_role(chunk) else b""
        if not shown:
            return b""
        return event if self._shows_ids else _IDS.sub(rb'"\1":null', event)

    def rewind(self) -> None:
        """Another engine goes on after the last token whose text the client has."""
        del self.ids[self.told :]
        self.base = self.told
        self.thinking = not self.pieces or self.pieces[-1][2]
        self.reasoned = self._reasoning_ids
        self.rejoined = True
        self.failed = False

    def said(self) -> tuple[str, str]:
        """A chat's reasoning and content."""
        both = [[text for _, text, thought in self.pieces if thought is kind] for kind in (True, False)]
        return "".join(both[0]), "".join(both[1])

    def tail(self, chars: int) -> tuple[int, str, bool] | None:
        """The end of a chat's text, at least so long and all of one kind: the ids before it, it, and whether it is
        reasoning. None: that kind has less."""
        text, kind = "", bool(self.pieces) and self.pieces[-1][2]
        for at in range(len(self.pieces) - 1, 0, -1):
            if self.pieces[at][2] is not kind or self.pieces[at - 1][2] is not kind:
                return None
            text = self.pieces[at][1] + text
            if len(text) >= chars:
                return self.pieces[at - 1][0], text, kind
        return None

    def ending(self, *, include_usage: bool) -> bytes:
        """The events that were lost with an engine that had told everything else."""
        chunk: dict[str, Any] = {"id": self._id, "created": self._created, "model": self._model, "choices": []}
        chunk["object"] = "chat.completion.chunk" if self._kind is Kind.CHAT else "text_completion"
        prompt, answer = len(self.prompt_ids or ()), len(self.ids)
        chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        usage = written(chunk) if include_usage and not self.usage_told else b""
        return usage + b"data: " + DONE + b"\n\n"

    def _note(self, choice: dict[str, Any]) -> bool:
        """Keep what a choice says. Whether the client would have it without token ids."""
        ids = choice.get("token_ids") or ()
        self.ids += ids
        if self.prompt_ids is None and isinstance(choice.get("prompt_token_ids"), list):
            self.prompt_ids = choice["prompt_token_ids"]
        finish = choice.get("finish_reason")
        if finish is not None:
            self.finished = True
        delta = choice.get("delta")
        if delta is None:
            if choice.get("text") or not self._text_kind:
                self.told = len(self.ids)
            return True
        content, reasoning = delta.get("content") or "", delta.get("reasoning") or ""
        if content or reasoning or delta.get("tool_calls"):
            self.told = told = len(self.ids)
            if reasoning:
                self._reasoning_ids += len(ids)
                self.pieces.append((told, reasoning, True))
            if content:
                self.pieces.append((told, content, False))
        return self._shows_ids or bool(delta) or finish is not None

    def _repeats_role(self, chunk: dict[str, Any]) -> bool:
        choices = chunk.get("choices")
        delta = (choices[0].get("delta") if choices else None) or {}
        return "role" in delta and not delta.get("content")

    def _rewritten(self, chunk: dict[str, Any]) -> bytes:
        if self._id is not None:
            chunk["id"] = self._id
        if self._created is not None:
            chunk["created"] = self._created
        if chunk.get("prompt_token_ids") is not None:
            chunk["prompt_token_ids"] = None
        for choice in chunk.get("choices") or ():
            if choice.get("prompt_token_ids") is not None:
                choice["prompt_token_ids"] = None
            if not self._shows_ids and choice.get("token_ids") is not None:
                choice["token_ids"] = None
        usage = chunk.get("usage")
        if usage:
            self._whole_usage(usage)
        return written(chunk)

    def _give_held(self, delta: dict[str, Any]) -> None:
        if delta.get("reasoning"):
            delta["reasoning"] = self.held + delta["reasoning"]
            self.held = ""
        elif delta.get("content"):
            self.held = ""  # reasoning has ended, and white space at its end is not shown

    def _whole_usage(self, usage: dict[str, Any]) -> None:
        """For the client it is one answer to its own prompt."""
        prompt = len(self.prompt_ids or ())
        usage["prompt_tokens"] = prompt
        usage["completion_tokens"] = usage.get("completion_tokens", 0) + self.base
        usage["total_tokens"] = prompt + usage["completion_tokens"]
        details = usage.get("prompt_tokens_details")
        if details and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], prompt)
        details = usage.get("completion_tokens_details")
        if details and isinstance(details.get("reasoning_tokens"), int):
            # An engine that began with content does not know, and counts all of it.
            more = details["reasoning_tokens"] if self.thinking else 0
            details["reasoning_tokens"] = self.reasoned + more
