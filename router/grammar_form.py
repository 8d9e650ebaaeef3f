"""What an answer must look like: where each API says it, and what becomes of it."""

from typing import Any, NamedTuple

import orjson

from deepinfer_router.api import Api, Kind
from deepinfer_router.errors import Refusal

MAX_NESTING = 64
"""Objects and arrays within each other in a schema: vLLM 0.32 refuses more."""


FORM_FIELDS = frozenset(("response_format", "structured_outputs", "sampling_params", "output_config", "text"))
"""Without one of these a body has no constraint."""
_WITHIN = {Kind.MESSAGES: "output_config", Kind.RESPONSES: "text"}


class Form(NamedTuple):
    """One constraint."""

    kind: str
    """json, regex or grammar."""
    text: str
    param: str
    """The field that says it."""


class Verdict(NamedTuple):
    """What is to be done with a constraint."""

    word: str
    """ok; refused; unread: the engine may know better; costly."""
    reason: str = ""


OK = Verdict("ok")


def form_of(api: Api, fields: dict[str, Any]) -> Form | None:
    """The constraint that an engine would read of a request; None: none, or of a kind that the entry does not read.

    Raises:
        Refusal: 400, what vLLM refuses whichever its backend.
    """
    within = _WITHIN.get(api.kind)
    where, name = (fields.get(within), "format") if within else (fields, "response_format")
    asked = where.get(name) if isinstance(where, dict) else None
    if isinstance(asked, dict) and asked.get("type") not in (None, "text"):
        if asked["type"] != "json_schema":
            return None
        param = f"{within}.{name}" if within else name
        inner = asked.get("json_schema", asked)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        return None if schema is None else _json(schema, param)
    where = fields.get("sampling_params") if api.in_sampling_params else fields
    asked = where.get("structured_outputs") if isinstance(where, dict) else None
    return _structured_outputs(asked) if isinstance(asked, dict) else None


def _structured_outputs(asked: dict[str, Any]) -> Form | None:
    if (schema := asked.get("json")) is not None:
        return _json(schema, "structured_outputs.json")
    if isinstance(regex := asked.get("regex"), str):
        if "\0" in regex:
            raise _refusal("structured_outputs.regex", "has a NUL character, which no engine reads: take it out")
        return Form("regex", regex, "structured_outputs.regex")
    if isinstance(grammar := asked.get("grammar"), str):
        if not grammar.strip():
            raise _refusal("structured_outputs.grammar", "is empty: give a grammar, or leave it out")
        return Form("grammar", grammar, "structured_outputs.grammar")
    if asked.get("choice") == []:
        raise _refusal("structured_outputs.choice", "is empty: give one text at least, or leave it out")
    if asked.get("json_object") is False:
        raise _refusal("structured_outputs.json_object", "is false: leave it out")
    return None


def _json(schema: Any, param: str) -> Form:
    if isinstance(schema, str):
        if not schema.strip():
            raise _refusal(param, "is empty: give a schema, or leave it out")
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise _refusal(param, f"is no JSON: {error}") from error
    if _nests_deeper(schema, MAX_NESTING):
        raise _refusal(param, f"nests objects and arrays more than {MAX_NESTING} deep: flatten it, or use $ref")
    return Form("json", orjson.dumps(schema).decode(), param)


def _nests_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _refusal(param: str, what: str) -> Refusal:
    return Refusal(400, "invalid_grammar", f"{param} {what}", param=param)
