"""What the entry refuses, vLLM's own checks refuse: else a request would fail here that an engine would answer."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_router.grammar_verdict import verdict

pytestmark = pytest.mark.vllm

GOOD = st.sampled_from(
    [{"type": "string"}, {"type": "integer"}, {"type": "null"}, {}, True, {"enum": ["a", 1]}, {"const": 1}]
)
FAULTS = st.sampled_from(
    [
        ("type", "foo"),
        ("type", 5),
        ("type", ["string", "q"]),
        ("$ref", "#/$defs/x"),
        ("$ref", 5),
        ("pattern", "("),
        ("enum", []),
        ("properties", 5),
        ("properties", {"a": 5}),
        ("required", 5),
        ("items", 5),
        ("anyOf", 5),
        ("minLength", "a"),
        ("additionalProperties", 5),
        ("prefixItems", 5),
        ("format", "foo"),
        ("not", {}),
        ("patternProperties", {"(": {}}),
    ]
)


def around(inner: Any) -> Any:
    """A schema that holds others, and may be broken itself."""
    whole = st.one_of(
        st.builds(lambda a, b: {"type": "object", "properties": {"a": a, "b": b}}, inner, inner),
        st.builds(lambda a: {"type": "array", "items": a}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a: {"oneOf": [a]}, inner),
        st.builds(lambda a: {"allOf": [a]}, inner),
        st.builds(lambda a: {"properties": {"a": a}}, inner),
        st.builds(lambda a: {"type": "object", "additionalProperties": a}, inner),
        st.builds(lambda a: {"type": "array", "prefixItems": [a]}, inner),
    )
    return whole | st.builds(lambda schema, fault: {**schema, fault[0]: fault[1]}, whole, FAULTS)


SCHEMAS = st.recursive(GOOD | st.builds(lambda fault: {fault[0]: fault[1]}, FAULTS), around, max_leaves=6).filter(
    lambda schema: isinstance(schema, dict)
)
WHOLE = ["{2,1}", "{3}", "[z-a]", "[^", "(?:", "(?=", "(?i)", "(?x)", "(?P<n>", "[a-z]", "[[:alpha:]]"]
PIECES = [*"ab()[]{}*+?|^$.,-1\\&#", "\\d", "\\b", "\\1", "\\]", "\\[", "\\(", *WHOLE]
REGEXES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=10).map("".join)
WORDS = st.sampled_from(
    ["root", "a", "b", "::=", '"x"', "|", "(", ")", "*", "[a-z]", "\n", "start:", "'y'", "{2}", "Tag", "#"]
)

GRAMMARS = st.one_of(
    st.lists(WORDS, min_size=1, max_size=9).map(" ".join),
    st.lists(WORDS, max_size=5).map(lambda words: " ".join(["root ::=", *words])),
    st.lists(WORDS, max_size=5).map(lambda words: " ".join(['root ::= a b "x"\na ::= "y"\n', *words])),
)


def refused_by_vllm(**asked: Any) -> bool:
    """By its backend `auto`: by xgrammar, and by the one that is tried then."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    for check in (validate_xgrammar_grammar, validate_guidance_grammar):
        try:
            check(SamplingParams(structured_outputs=StructuredOutputsParams(**asked)))
        except VLLMValidationError:
            continue
        return False
    return True


@settings(max_examples=1500)
@given(SCHEMAS)
def test_schemas(schema: dict[str, Any]) -> None:
    if verdict("json", json.dumps(schema), "auto").word == "refused":
        assert refused_by_vllm(json=schema)


@settings(max_examples=1500)
@given(REGEXES)
def test_regexes(regex: str) -> None:
    if verdict("regex", regex, "auto").word == "refused":
        assert refused_by_vllm(regex=regex)


@settings(max_examples=1000)
@given(GRAMMARS)
def test_grammars(grammar: str) -> None:
    if verdict("grammar", grammar, "auto").word == "refused":
        assert refused_by_vllm(grammar=grammar)


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "foo"}},
        {"json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}},
        {"regex": "(a"},
        {"grammar": "root ::= missing"},
    ],
)
def test_both_refuse(asked: dict[str, Any]) -> None:
    ((kind, what),) = asked.items()
    assert verdict(kind, what if isinstance(what, str) else json.dumps(what), "auto").word == "refused"
    assert refused_by_vllm(**asked)
