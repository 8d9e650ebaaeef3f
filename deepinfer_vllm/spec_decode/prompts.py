"""Files of prompts: texts, conversations or token ids, one a line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMS = '{"prompt": "..."}, {"messages": [...]} or {"prompt_token_ids": [...]}'


class PromptsError(ValueError):
    """A file of prompts that cannot be read. One line, with the number of the line at fault."""


@dataclass(frozen=True)
class Prompt:
    """One of the three is there."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in order: of JSON Lines where its name ends in .jsonl, else a text a line.

    Empty lines are passed over. Raises PromptsError, also for a file without a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptsError(f"{path}: not UTF-8 at byte {error.start}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_parsed(line, f"{path}, line {number}") if path.suffix == ".jsonl" else Prompt(text=line))
    if not prompts:
        raise PromptsError(f"{path}: no prompt in it; one a line is needed")
    return prompts


def _parsed(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptsError(f"{where}: no JSON ({error}); a line is {FORMS}") from None
    if isinstance(value, dict):
        text, messages, ids = (value.get(name) for name in ("prompt", "messages", "prompt_token_ids"))
        if isinstance(text, str) and text:
            return Prompt(text=text)
        if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
            return Prompt(messages=messages)
        if isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
            return Prompt(token_ids=ids)
    raise PromptsError(f"{where}: a line is {FORMS}, none of them empty")
