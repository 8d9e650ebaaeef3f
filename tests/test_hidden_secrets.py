"""What is secret in command lines and settings is in no file; all else is there as it was given."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_vllm import record_facts
from deepinfer_vllm.hidden_secrets import HIDDEN, hidden, hidden_line, hidden_words, is_secret

KEY = "sk-0123456789"


@pytest.mark.parametrize(
    "name",
    ["--api-key", "--hf_token", "token", "Authorization", "x-api-key", "X-Auth-User", "Cookie", "accessToken", "apiKey"]
    + ["DB_PASSWORD", "client.secret.value", "Proxy-Authorization", "credentials", "--kv-transfer-config.auth_token"],
)
def test_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["--tokenizer", "--max-num-batched-tokens", "stop_token_ids", "eos_token_id", "max_tokens", "--ssl-keyfile", ""]
    + ["secret_file", "DEEPINFER_VLLM_SCHED_TARGET_MS", "key_bytes", "author", "-", "kv_connector_extra_config"],
)
def test_no_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--api-key", KEY, KEY, "--port", "1"], ["--api-key", HIDDEN, HIDDEN, "--port", "1"]),
        ([f"--hf-token={KEY}", "m"], [f"--hf-token={HIDDEN}", "m"]),
        (["--header", f"Authorization=Bearer {KEY}"], ["--header", f"Authorization={HIDDEN}"]),
        (["--header", "Authorization=Bearer", KEY], ["--header", f"Authorization={HIDDEN}", HIDDEN]),
        ([f"--header=X-Api-Key={KEY}"], [f"--header=X-Api-Key={HIDDEN}"]),
        (["--header", f"Authorization: {KEY}"], ["--header", HIDDEN]),
        ([f"OPENAI_API_KEY={KEY}", "deepinfer"], [f"OPENAI_API_KEY={HIDDEN}", "deepinfer"]),
        ([f"http://me:{KEY}@host:8000/v1"], [f"http://{HIDDEN}@host:8000/v1"]),
        (["--extra-body", f'{{"user": {{"token": "{KEY}"}}}}'], ["--extra-body", '{"user": {"token": "***"}}']),
        (["--bench", f"--x --header Authorization={KEY}"], ["--bench", "--x --header 'Authorization=***'"]),
        (["--bench", f"--header Authorization={KEY}"], ["--bench", "--header 'Authorization=***'"]),
        ([f"--serve=m --api-key {KEY}"], ["--serve=m --api-key '***'"]),
        (["--serve", f"m 'a --api-key {KEY}"], ["--serve", shlex.join(["m", "'a", "--api-key", HIDDEN])]),
        (["--extra-headers", f"Authorization: Bearer {KEY}"], ["--extra-headers", HIDDEN]),
        (["-H", f"Authorization: Bearer {KEY}"], ["-H", f"Authorization: {HIDDEN}"]),
        ([f"-HAuthorization: Bearer {KEY}"], [f"-HAuthorization: Bearer {HIDDEN}"]),
        (["sh", "-c", f"curl -H 'x-api-key:{KEY}' h"], ["sh", "-c", f"curl -H 'x-api-key:{HIDDEN}' h"]),
        ([f"--url=http://h/v1?a=b&api_key={KEY}#c"], [f"--url=http://h/v1?a=b&api_key={HIDDEN}#c"]),
        ([f"http://me:with@{KEY}@host/a@b"], [f"http://{HIDDEN}@host/a@b"]),
        (["--x", f'a={{"api_key": "{KEY}"}}'], ["--x", 'a={"api_key": "***"}']),
        (["--x", f'{{"a": ["--api-key", "{KEY}"]}}'], ["--x", '{"a": ["--api-key", "***"]}']),
        (["--x", f'{{"a": "m --hf-token={KEY}"}}'], ["--x", """{"a": "m '--hf-token=***'"}"""]),
    ],
)
def test_values_are_hidden_wherever_they_stand(given: list[str], kept: list[str]) -> None:
    found = hidden_words(given)
    assert found == kept
    assert hidden_words(found) == found


def test_other_headers_can_be_told_apart_and_not_read() -> None:
    (_, first), (_, again), (_, other) = (hidden_words(["--header", f"X-Tenant={name}"]) for name in ("a", "a", "b"))
    assert (
        first == again != other and first.startswith("X-Tenant=sha256:") and len(first) == len("X-Tenant=sha256:") + 12
    )


@pytest.mark.parametrize(
    "line",
    ["m --tokenizer t --max-model-len 4096", "--ignore-eos", "", "a 'b c' --x=\"y z\"", "an 'open quotation"]
    + ["""m --kv-transfer-config '{"kv_connector": "x", "extra": {"stop_token_ids": [1]}}'""", "{no json", "a=b"],
)
def test_what_has_no_secret_stays_as_it_is(line: str) -> None:
    assert hidden_line(line) == line


@given(st.lists(st.text(st.sampled_from("ab -=:\"'{}[]\\@/.*"), max_size=12), max_size=5))
def test_any_words_come_to_an_end_and_only_secrets_change(words: list[str]) -> None:
    found = hidden_words(words)
    assert len(found) == len(words)
    if "--header" not in words and not any("@" in word for word in words):
        assert found == words
    hidden_line(" ".join(words))
    assert shlex.split(shlex.join(found)) == found


def test_json_of_any_depth_comes_to_an_end() -> None:
    for depth in (100, 300, 600, 900, 100_000):
        nested = "[" * depth + "]" * depth
        assert hidden_words(["--x", nested]) == ["--x", nested]


def test_settings_keep_their_form() -> None:
    settings = {"engine": {"hf_token": KEY, "dtype": "float32", "more": [{"password": KEY}, ("a", 1)]}, "seed": 0}
    kept = {"engine": {"hf_token": HIDDEN, "dtype": "float32", "more": [{"password": HIDDEN}, ["a", 1]]}, "seed": 0}
    assert hidden(settings) == kept
    assert hidden({"hf_token": None, "api_key": ""}) == {"hf_token": None, "api_key": ""}


def test_a_record_hides_them_too_and_says_what_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = record_facts.record_facts(["x", "a b", "--api-key", KEY])
    assert found["command"] == "x 'a b' --api-key '***'" and KEY not in json.dumps(found)
    assert len(found["commit"].removesuffix("-dirty")) >= 7 and found["machine"]["cores"] > 0
    monkeypatch.setattr(record_facts, "_ROOT", tmp_path)  # as installed, where a checkout around it is another's
    assert record_facts.record_facts([])["commit"].startswith("deepinfer-vllm ")
