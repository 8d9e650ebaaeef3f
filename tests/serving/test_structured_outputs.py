"""Regular expressions, JSON schemas and EBNF hold even random weights to their form."""

import json
import re

import pytest

from serving.client import Api

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUM = 'root ::= term (" + " term){2}\nterm ::= [0-9]{1,2} | "(" [0-9] " * " [0-9] ")"'


def check_person(text: str) -> None:
    person = json.loads(text)
    assert person.keys() == PERSON["properties"].keys()
    assert re.fullmatch("[A-Z][a-z]{1,8}", person["name"])
    assert person["age"] in range(121)
    assert 1 <= len(person["tags"]) <= 3 and set(person["tags"]) <= {"a", "b"}


def test_regex(api: Api) -> None:
    choice = api.chat("A date, please.", max_tokens=40, structured_outputs={"regex": r"20[0-9]{2}-(0[1-9]|1[0-2])"})
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


def test_json_schema_as_response_format(api: Api) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    choice = api.chat("A person, please.", max_tokens=200, response_format=schema)
    check_person(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


def test_json_schema_of_a_response(api: Api) -> None:
    schema = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    answer = api.post(
        "/v1/responses",
        input="A person, please.",
        max_output_tokens=200,
        reasoning={"effort": "none"},
        text={"format": schema},
    )
    check_person(answer["output"][0]["content"][0]["text"])


def test_json_schema_of_a_completion(api: Api) -> None:
    """With a reasoning parser, vLLM holds a bare prompt to a form only once </think> stands in it or in the answer."""
    check_person(api.complete("A person:</think>", max_tokens=200, structured_outputs={"json": PERSON})["text"])


def test_ebnf(api: Api) -> None:
    text = api.chat("A sum, please.", max_tokens=60, structured_outputs={"grammar": SUM})["message"]["content"]
    assert re.fullmatch(r"(\d{1,2}|\(\d \* \d\))( \+ (\d{1,2}|\(\d \* \d\))){2}", text)


def test_choice(api: Api) -> None:
    answer = api.chat("Yes or no?", max_tokens=10, structured_outputs={"choice": ["yes", "no"]})
    assert answer["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize("broken", [{"regex": "[0-9"}, {"grammar": 'root ::= "a'}, {"json": '{"type": 7}'}])
def test_broken_constraint_is_refused(api: Api, broken: dict[str, str]) -> None:
    status, message = api.refusal("/v1/completions", prompt="Hello", max_tokens=4, structured_outputs=broken)
    assert status == 400
    assert message
