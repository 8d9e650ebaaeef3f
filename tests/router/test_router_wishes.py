"""Tenant, TTL class, cache salt: said by key, route or an allowed header, and never by the client."""

from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest
from exchanges import chat, received

from deepinfer_kvstore.retention import DEFAULT_TTL
from deepinfer_router.entry import Entry
from deepinfer_router.errors import Refusal
from deepinfer_router.identity_config import ApiKey, Grant, IdentityConfig, RouteTtl, TtlClass
from deepinfer_router.request import Request
from deepinfer_router.store_config import StoreConfig

STORE = StoreConfig(socket=Path("/nowhere/check.sock"))
OWN = {
    "kv_transfer_params": {"kvstore": {"tenant": "other", "ticket": "x"}, "remote_host": "evil"},
    "cache_salt": "other",
}


def read(
    grant: Grant, route: str = "/v1/chat/completions", fields: Any = None, store: Any = STORE, **headers: str
) -> Request:
    entry = Entry(identity=IdentityConfig(everybody=grant), store=store)
    return entry.read(received(route, fields or chat(), **headers))


def sent(*args: Any, **kwargs: Any) -> Any:
    return orjson.loads(read(*args, **kwargs).body())


def test_the_key_decides() -> None:
    body = sent(Grant(tenant="t", ttl_class="agent", cache_salt="s"), fields=chat(**OWN))
    assert body["kv_transfer_params"] == {"kvstore": {"tenant": "t", "ttl_class": "agent"}}
    assert body["cache_salt"] == "s"


def test_where_nothing_is_decided_the_clients_word_goes_all_the_same() -> None:
    body = sent(Grant(), fields=chat(**OWN))
    assert body["kv_transfer_params"] == {"kvstore": {}}
    assert "cache_salt" not in body


def test_without_a_store_bodies_pass() -> None:
    assert sent(Grant(), fields=chat(**OWN), store=None) == chat(**OWN)


@pytest.mark.parametrize("store", [STORE, None])
def test_where_there_are_keys_no_client_says_whose_memory_is_read(store: StoreConfig | None) -> None:
    key = ApiKey(name="k", sha256=sha256(b"k").hexdigest())
    entry = Entry(identity=IdentityConfig(keys=(key,)), store=store)
    for route in ("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/embeddings"):
        fields = chat(**OWN, ec_transfer_params={"remote_host": "evil"})
        body = orjson.loads(entry.read(received(route, fields, authorization="Bearer k")).body())
        assert body.get("kv_transfer_params") in (None, {"kvstore": {}})
        assert "ec_transfer_params" not in body


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/chat/completions", chat(vllm_xargs={"kv_transfer_params": "x"})),
        ("/v1/chat/completions/batch", chat(vllm_xargs={"ec_transfer_params": 1})),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {"remote_host": "evil"}}}},
        ),
    ],
)
def test_nor_where_vllm_lets_any_argument_through(route: str, fields: Any) -> None:
    with pytest.raises(Refusal, match="leave them out of") as refused:
        read(Grant(), route, fields)
    assert refused.value.status == 400
    assert read(Grant(), route, fields, store=None).changes == {}
    read(Grant(), route, {**fields, "vllm_xargs": {"x": 1}, "sampling_params": {"extra_args": {"x": 1}}})


def test_salts_without_a_store_keep_engines_own_caches_apart() -> None:
    assert sent(Grant(cache_salt="s"), fields=chat(cache_salt="other"), store=None)["cache_salt"] == "s"
    key = ApiKey(name="k", sha256=sha256(b"k").hexdigest(), cache_salt="s")
    other = ApiKey(name="o", sha256=sha256(b"o").hexdigest())
    entry = Entry(identity=IdentityConfig(keys=(key, other)))
    request = entry.read(received("/v1/chat/completions", chat(cache_salt="s"), authorization="Bearer o"))
    assert "cache_salt" not in orjson.loads(request.body())  # or it would read what is k's


@pytest.mark.parametrize(
    ("route", "fields", "told", "salted"),
    [
        ("/v1/completions", {"prompt": "a"}, True, True),
        ("/v1/responses", {"input": "a"}, True, True),
        ("/v1/messages", chat(), True, True),
        ("/inference/v1/generate", {"token_ids": [1]}, True, True),
        ("/v1/embeddings", {"input": "a"}, False, True),
        ("/v1/rerank", {"query": "a"}, False, True),
        ("/v1/chat/completions/batch", {"messages": [[]]}, False, True),
        ("/tokenize", {"prompt": "a"}, False, False),
    ],
)
def test_every_api(route: str, fields: Any, told: bool, salted: bool) -> None:
    body = sent(Grant(tenant="t", cache_salt="s"), route, fields)
    assert (body.get("kv_transfer_params") == {"kvstore": {"tenant": "t"}}) == told
    assert (body.get("cache_salt") == "s") == salted


def test_headers_decide_where_they_may() -> None:
    headers = {"x_tenant": "h", "x_ttl_class": "chat", "x_cache_salt": "hs"}
    may = read(Grant(tenant="t", ttl_class="agent", may_set=("tenant", "ttl_class", "cache_salt")), **headers)
    assert (may.work.tenant, may.ttl_class, may.cache_salt) == ("h", "chat", "hs")
    may_not = read(Grant(tenant="t", ttl_class="agent"), **headers)
    assert (may_not.work.tenant, may_not.ttl_class, may_not.cache_salt) == ("t", "agent", None)
    names = [name for name, _ in may.headers_for_engine()]
    assert not {b"x-tenant", b"x-ttl-class", b"x-cache-salt"} & set(names)


def test_a_tenant_is_one_without_a_store_too() -> None:
    """Tenants share the queue and the metrics, whatever is stored."""
    assert read(Grant(tenant="t", may_set=("tenant",)), store=None, x_tenant="h").work.tenant == "h"
    assert read(Grant(tenant="t"), store=None, x_tenant="h").work.tenant == "t"


@pytest.mark.parametrize("headers", [{"x_ttl_class": "ever"}, {"x_cache_salt": "a/b"}, {"x_tenant": "t" * 129}])
def test_bad_headers_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Refusal, match="header x-") as refused:
        read(Grant(may_set=("tenant", "ttl_class", "cache_salt")), **headers)
    assert refused.value.status == 400


def test_none_is_a_class_of_the_store() -> None:
    """It keeps such blocks until their space is needed."""
    body = orjson.loads(read(Grant(ttl_class="none")).body())
    assert body["kv_transfer_params"] == {"kvstore": {"ttl_class": "none"}}
    assert set(DEFAULT_TTL) == set(get_args(TtlClass))


def test_routes_decide_for_keys_that_say_nothing() -> None:
    routes = (RouteTtl(prefix="/v1/messages", ttl_class="agent"), RouteTtl(prefix="/v1", ttl_class="chat"))
    entry = Entry(identity=IdentityConfig(routes=routes), store=STORE)
    assert entry.read(received("/v1/messages", chat())).ttl_class == "agent"
    assert entry.read(received("/v1/chat/completions", chat())).ttl_class == "chat"
    assert entry.read(received("/inference/v1/generate", {"token_ids": [1]})).ttl_class is None


def test_hops_add_to_what_is_said() -> None:
    request = read(Grant(tenant="t"))
    body = orjson.loads(request.body({"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}))
    assert body["kv_transfer_params"] == {"kvstore": {"tenant": "t"}, "do_remote_decode": True}
    plain = read(Grant(), fields=chat(kv_transfer_params={"a": 1}), store=None)
    assert orjson.loads(plain.body({"kv_transfer_params": {"b": 2}}))["kv_transfer_params"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("salt", ["", "a@b", "a/b", "a\\b", "a\0b", "a" * 129])
def test_salts_are_such_that_engines_take_them(salt: str) -> None:
    with pytest.raises(ValueError, match="cache_salt"):
        Grant(cache_salt=salt)
