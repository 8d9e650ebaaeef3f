"""A task: questions with their answers, from JSON Lines."""

import hashlib
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from deepinfer_vllm.evaluation.choices import MAX_OPTIONS
from deepinfer_vllm.evaluation.errors import EvaluationError
from deepinfer_vllm.evaluation.exact import normalised
from deepinfer_vllm.evaluation.integers import NUMBER, canonical

BUILTIN = "builtin:"
KINDS = ("choice", "exact", "integer")
FIELDS = {"id", "kind", "question", "problem", "prompt", "choices", "answer", "stop"}
Kind = Literal["choice", "exact", "integer"]


@dataclass(frozen=True)
class Item:
    """One question."""

    id: str
    kind: Kind
    question: str
    answers: tuple[str, ...]
    """What is right: a letter, an integer in canonical form, or normalised texts."""
    options: tuple[str, ...] = ()
    """Of a choice."""
    raw: bool = False
    """The question is a prompt to go on with: no chat template, nothing added."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply."""


@dataclass(frozen=True)
class Task:
    """What a file holds."""

    name: str
    digest: str
    """SHA-256 of its bytes."""
    items: tuple[Item, ...]


def builtin_names() -> list[str]:
    """Tasks that come with the package."""
    files = resources.files("deepinfer_vllm.evaluation").iterdir()
    return sorted(file.name.removesuffix(".jsonl") for file in files if file.name.endswith(".jsonl"))


def read_task(where: str) -> Task:
    """The task of a file, or `builtin:NAME`. Raises EvaluationError, with the line at fault."""
    if where.startswith(BUILTIN):
        name = where.removeprefix(BUILTIN)
        if name not in builtin_names():
            raise EvaluationError(f"{where}: no such task; there is {', '.join(BUILTIN + n for n in builtin_names())}")
        content = resources.files("deepinfer_vllm.evaluation").joinpath(f"{name}.jsonl").read_bytes()
    else:
        name = Path(where).stem
        try:
            content = Path(where).read_bytes()
        except OSError as error:
            raise EvaluationError(f"{where}: {error.strerror}") from None
    return Task(name, hashlib.sha256(content).hexdigest(), _items(where, content))


def encodable(value: Any) -> bool:
    """Whether all text of a JSON value is Unicode: no half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _items(where: str, content: bytes) -> tuple[Item, ...]:
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{where}: not UTF-8 at byte {error.start}") from None
    items: dict[str, Item] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = _item(json.loads(line), str(number))
        except RecursionError:
            raise EvaluationError(f"{where}, line {number}: nested too deeply") from None
        except ValueError as error:
            raise EvaluationError(f"{where}, line {number}: {error}") from None
        if item.id in items:
            raise EvaluationError(f"{where}, line {number}: the id {item.id!r} is that of an earlier line")
        items[item.id] = item
    if not items:
        raise EvaluationError(f"{where}: no question in it; one a line is needed")
    return tuple(items.values())


def _item(value: Any, number: str) -> Item:
    """Raises ValueError with what is wrong."""
    if not isinstance(value, dict):
        raise ValueError('a line is {"question": ..., "answer": ...}')
    if not encodable(value):
        raise ValueError("half of a surrogate pair, \\ud800 to \\udfff, by itself: no character, so no tokens")
    unknown = sorted(value.keys() - FIELDS)
    if unknown and "kind" in value:
        raise ValueError(f"unknown field {unknown[0]!r}; there are {', '.join(sorted(FIELDS))}")
    asked = [name for name in ("question", "problem", "prompt") if name in value]
    if len(asked) != 1:
        raise ValueError(f"one of question, problem and prompt is needed; there is {' and '.join(asked) or 'none'}")
    question, answer = value[asked[0]], value.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{asked[0]} is no text, or an empty one")
    options, stop = (_texts(value, name) for name in ("choices", "stop"))
    kind = value.get("kind", _kind_of(answer, options))
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: one of {', '.join(KINDS)}")
    if (kind == "choice") != bool(options):
        raise ValueError("a choice needs choices, and only a choice has them")
    right = {"choice": _letters, "exact": _wordings, "integer": _integers}[kind](answer, options)
    name = value.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ValueError(f"id {name!r} is neither text nor a whole number")
    return Item(str(name), kind, question, right, options, asked[0] == "prompt", stop)


def _kind_of(answer: Any, options: Sequence[str]) -> str:
    if options:
        return "choice"
    text = str(answer).rpartition("####")[2].strip()
    return "integer" if NUMBER.fullmatch(text) and canonical(text) is not None else "exact"


def _texts(value: dict[str, Any], name: str) -> tuple[str, ...]:
    found = value.get(name, [])
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise ValueError(f"{name} is no list of texts")
    return tuple(found)


def _letters(answer: Any, options: tuple[str, ...]) -> tuple[str, ...]:
    if not 2 <= len(options) <= MAX_OPTIONS:
        raise ValueError(f"{len(options)} choices: 2 to {MAX_OPTIONS} are needed")
    letters = string.ascii_uppercase[: len(options)]
    if type(answer) is int and 0 <= answer < len(options):
        return (letters[answer],)
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return (answer,)
    raise ValueError(
        f"answer {answer!r} is no letter from A to {letters[-1]}, nor a number from 0 to {len(options) - 1}"
    )


def _integers(answer: Any, options: tuple[str, ...]) -> tuple[str, ...]:
    text = str(answer).rpartition("####")[2].strip()  # GSM8K: the solution, ####, the number
    found = canonical(text) if NUMBER.fullmatch(text) else None
    if found is None:
        raise ValueError(f"answer {text[:40]!r} is no integer")
    return (found,)


def _wordings(answer: Any, options: tuple[str, ...]) -> tuple[str, ...]:
    given = answer if isinstance(answer, list) else [answer]
    right = tuple(dict.fromkeys(normalised(text) if isinstance(text, str) else "" for text in given))
    if not right or "" in right:
        raise ValueError(f"answer {answer!r} is no text of letters or digits, nor a list of such")
    return right
