"""Reads a constraint with llguidance, and says whether engines would refuse it.

vLLM 0.32 refuses (backend auto) what xgrammar cannot read and llguidance cannot either, so a fault that llguidance
finds is not enough. `CERTAIN` and `plain_fault` are the faults at which xgrammar has refused every one of some ten
thousand random constraints; a test goes on comparing them.
"""

import re
from typing import Any

import orjson
from llguidance import LLMatcher, grammar_from

from deepinfer_router.grammar_form import OK, Verdict

MAX_REASON_CHARS = 300
CERTAIN = {
    "json": re.compile(r"Pointer '.*' does not exist|\$ref must be a string"),
    "regex": re.compile(
        r"error: (?:repetition operator missing expression|invalid character class range|look-around|unopened group"
        r"|unclosed group|invalid repetition count range|repetition quantifier expects|unclosed counted repetition)"
        r"|lookarounds not supported yet; Word"
    ),
    "grammar": re.compile(r"Rule '[a-z]\w*' not found|No 'root' rule found"),
}
_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_OTHERWISE = frozenset(("$ref", "const", "enum", "anyOf", "oneOf", "allOf"))
"""Keywords beside which xgrammar does not look at the type."""


def verdict(kind: str, text: str, backend: str) -> Verdict:
    """Of one constraint. May take long, or all memory: for a process that can be ended."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(text) if kind == "json" else grammar_from(kind, text)
        fault = LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        fault = str(error)
    if not fault:
        return OK
    reason = " ".join(fault.split())[:MAX_REASON_CHARS]
    if backend == "guidance" or _is_certain(kind, text, fault):
        return Verdict("refused", reason)
    return Verdict("unread", reason)


def _is_certain(kind: str, text: str, fault: str) -> bool:
    if kind == "json":
        if "patternProperties" in text:  # vLLM asks outlines then
            return False
        schema = orjson.loads(text)
        return not isinstance(schema, dict) or bool(CERTAIN["json"].search(fault)) or plain_fault(schema)
    if kind == "regex" and (text.count("[") > 1 or "[]" in text or "[^]" in text):
        return False  # where a class ends they see differently: one within another, and an empty one
    return bool(CERTAIN[kind].search(fault))


def plain_fault(schema: Any) -> bool:
    """Whether a type is none, or a schema no schema, where xgrammar is sure to look."""
    if isinstance(schema, bool):
        return False
    if not isinstance(schema, dict):
        return True
    if _OTHERWISE & schema.keys():
        return False
    named = schema.get("type")
    if named is None:
        return False
    if isinstance(named, list):
        return any(not isinstance(one, str) or one not in _TYPES for one in named)
    if not isinstance(named, str) or named not in _TYPES:
        return True
    if named == "object" and (properties := schema.get("properties")) is not None:
        return not isinstance(properties, dict) or any(map(plain_fault, properties.values()))
    if named == "array" and (items := schema.get("items")) is not None and "prefixItems" not in schema:
        return not isinstance(items, list) and plain_fault(items)
    return False
