"""Whatever a client sends is a request or a refusal, and never anything else."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from exchanges import Received
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_case import recipe_entry, write_tokenizer

from deepinfer_router.api import POSTED, api_of
from deepinfer_router.entry import Entry
from deepinfer_router.error_body import render
from deepinfer_router.errors import Refusal
from deepinfer_router.grammar_form import form_of
from deepinfer_router.identity_config import Grant, IdentityConfig
from deepinfer_router.store_config import StoreConfig

FIELDS = """
model stream n max_tokens max_completion_tokens max_output_tokens messages input prompt token_ids system content role
type text image_url source url data output tools function name parameters strict tool_choice response_format
json_schema schema structured_outputs json regex grammar choice format output_config kv_transfer_params kvstore
cache_salt priority session_id seed logprobs stop sampling_params chat_template_kwargs thinking reasoning_effort
features echo previous_response_id
"""
NAMES = st.sampled_from(sorted(set(FIELDS.split())))
WORDS = st.sampled_from(
    ["", "m", "user", "assistant", "text", "image", "json_schema", "auto", "required", "(", "a\0", "<｜User｜>"]
)
LEAVES = st.none() | st.booleans() | st.integers(-3, 2**63) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=15
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=8)
READ = """
x-request-id x-session-id x-priority x-request-timeout-ms x-ttl-class x-cache-salt x-tenant authorization
"""
HEADERS = st.dictionaries(
    st.sampled_from(READ.encode().split()),
    st.text("a/ é1-_\t", max_size=6).map(lambda text: text.encode("latin-1"))
    | st.sampled_from([b"1", b"agent", b"a/b", b"t" * 200, b"nan", b"Bearer x"]),
    max_size=3,
)
MAY_SET = IdentityConfig(everybody=Grant(may_set=("tenant", "ttl_class", "cache_salt", "priority")))
ROUTES = st.sampled_from(sorted(POSTED))


def read_and_use(entry: Entry, exchange: Received) -> None:
    active = entry.identities.everybody.active if entry.identities.everybody else 0
    try:
        request = entry.read(exchange)
    except Refusal as refusal:
        status, _, body = render(refusal, api_of(exchange.method, exchange.route))
        assert 400 <= status < 500
        assert orjson.loads(body)["error"]["message"]
        assert entry.identities.everybody and entry.identities.everybody.active == active
        return
    assert request.work.prompt_tokens >= 0
    assert isinstance(request.why_not_resumable, str)
    assert request.request_id and request.request_id.isascii()
    if request.api.json:
        changed = orjson.loads(request.body({"stream": False}))
        kept = {name: value for name, value in request.fields.items() if name not in request.changes}
        assert changed == changed | {name: value for name, value in kept.items() if name != "stream"}
        try:
            form_of(request.api, request.fields)
        except Refusal as refusal:
            assert refusal.status == 400
    request.release()
    assert entry.identities.everybody and entry.identities.everybody.active == active


@settings(max_examples=500)
@given(route=ROUTES, fields=BODIES, headers=HEADERS)
def test_any_json_object(route: bytes, fields: dict[str, Any], headers: dict[bytes, bytes]) -> None:
    entry = Entry(identity=MAY_SET, store=StoreConfig(socket=Path("/none.sock")))
    read_and_use(entry, Received(route, orjson.dumps(fields), list(headers.items())))


@settings(max_examples=150)
@given(route=ROUTES, body=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes(route: bytes, body: bytes) -> None:
    read_and_use(Entry(), Received(route, body))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("fuzz"))


@settings(max_examples=150)
@given(
    route=st.sampled_from([b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"]),
    fields=BODIES,
    messages=st.lists(st.dictionaries(NAMES, VALUES, max_size=3), max_size=3),
)
def test_any_conversation_is_encoded_or_refused(tokenizer: Path, route: bytes, fields: Any, messages: Any) -> None:
    async def run() -> None:
        entry = recipe_entry(tokenizer)
        whole = {**fields, "input" if route == b"/v1/responses" else "messages": messages}
        try:
            request = entry.read(Received(route, orjson.dumps(whole)))
            await entry.prepare(request)
        except Refusal as refusal:
            assert refusal.status == 400
        else:
            assert request.token_ids is None or orjson.loads(request.body())["kv_transfer_params"]["prompt_token_ids"]
        await entry.close()

    asyncio.run(run())
