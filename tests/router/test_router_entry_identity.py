"""API keys and what each may do."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
from exchanges import Received, chat, received

from deepinfer_router.entry import Entry
from deepinfer_router.errors import Refusal, RouterConfigError
from deepinfer_router.identity import Identity
from deepinfer_router.identity_config import ApiKey, Grant, IdentityConfig
from deepinfer_router.token_bucket import TokenBucket


def key(text: str, **grants: Any) -> ApiKey:
    return ApiKey(name=text, sha256=sha256(text.encode()).hexdigest(), **grants)


def entry(*keys: ApiKey, **config: Any) -> Entry:
    return Entry(identity=IdentityConfig(keys=keys, **config))


def ask(entry: Entry, secret: str | None, **fields: Any) -> Any:
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    return entry.read(received("/v1/chat/completions", chat(**fields), **headers))


def refused(entry: Entry, secret: str | None, **fields: Any) -> tuple[int, str]:
    with pytest.raises(Refusal) as found:
        ask(entry, secret, **fields)
    return found.value.status, found.value.code


def test_without_keys_everybody_may_ask() -> None:
    assert ask(Entry(), None).identity.name == ""
    assert ask(Entry(), "anything").identity.name == ""


def test_who_may_not_ask_need_not_send_a_body() -> None:
    with pytest.raises(Refusal) as found:
        entry(key("alice")).gate([(b"authorization", b"Bearer bob")])
    assert (found.value.status, found.value.code) == (401, "invalid_api_key")
    entry(key("alice")).gate([(b"authorization", b"Bearer alice")])
    Entry().gate([])


def test_keys_are_told_apart() -> None:
    two = entry(key("alice", tenant="a", priority=2), key("bob", tenant="b"))
    request = ask(two, "alice")
    assert (request.identity.name, request.work.tenant, request.work.priority) == ("alice", "a", 2)
    assert ask(two, "bob").work.tenant == "b"
    assert two.read(received("/v1/messages", chat(), x_api_key="bob")).work.tenant == "b"
    assert two.read(received("/v1/messages", chat(), authorization="bearer  bob ")).work.tenant == "b"


def test_others_are_refused() -> None:
    one = entry(key("alice"))
    assert refused(one, None) == (401, "missing_api_key")
    assert refused(one, "") == (401, "missing_api_key")
    assert refused(one, "Alice") == (401, "invalid_api_key")
    with pytest.raises(Refusal) as found:
        one.read(received("/v1/models", None, authorization="Basic alice"))
    assert found.value.status == 401


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("ROUTER_KEY", "from-env")
    both = entry(ApiKey(name="f", file=tmp_path / "key"), ApiKey(name="e", env="ROUTER_KEY"))
    assert ask(both, "from-file").identity.name == "f"
    assert ask(both, "from-env").identity.name == "e"


def test_keys_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "")
    for bad, says in [
        (ApiKey(name="n", file=tmp_path / "none"), "cannot be read"),
        (ApiKey(name="n", env="EMPTY"), "EMPTY is empty"),
    ]:
        with pytest.raises(RouterConfigError, match=says):
            entry(bad)
    with pytest.raises(RouterConfigError, match="are one key"):
        entry(key("alice"), ApiKey(name="other", sha256=sha256(b"alice").hexdigest()))
    with pytest.raises(RouterConfigError, match="EMPTY is empty"):
        entry(engine_api_key_env="EMPTY")
    for wrong in ({"sha256": "alice"}, {}, {"env": "A", "file": "b"}):
        with pytest.raises(ValueError, match=r"64 hexadecimal|one of sha256"):
            ApiKey(name="n", **wrong)
    with pytest.raises(ValueError, match="twice"):
        IdentityConfig(keys=(key("alice"), key("alice")))


def test_the_clients_key_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"authorization" not in dict(ask(entry(key("alice")), "alice").headers_for_engine())
    monkeypatch.setenv("ENGINE_KEY", "e")
    headers = dict(ask(entry(key("alice"), engine_api_key_env="ENGINE_KEY"), "alice").headers_for_engine())
    assert headers[b"authorization"] == b"Bearer e"


def test_models() -> None:
    one = entry(key("alice", models=("m",)))
    assert ask(one, "alice", model="m").work.model == "m"
    assert refused(one, "alice", model="other") == (403, "model_not_allowed")
    assert refused(one, "alice", model=None) == (403, "model_not_allowed")


def test_the_list_of_models_is_of_no_model() -> None:
    one = entry(key("alice", models=("m",)))
    models = Received(b"/v1/models", method=b"GET", headers=[(b"authorization", b"Bearer alice")])
    assert one.read(models).identity.name == "alice"
    with pytest.raises(Refusal, match="may not use model"):
        one.read(Received(b"/v1/audio/transcriptions", b"--b", headers=models.headers))


def test_only_who_may_says_how_urgent_it_is() -> None:
    two = entry(key("may", may_set=("priority",)), key("not", priority=5))
    assert ask(two, "may", priority=-1).work.priority == -1
    request = ask(two, "not", priority=-1)
    assert request.work.priority == 5
    assert "priority" not in orjson.loads(request.body())
    exchange = received("/v1/chat/completions", chat(), authorization="Bearer not", x_vllm_priority="-9")
    assert b"x-vllm-priority" not in dict(two.read(exchange).headers_for_engine())


def test_concurrency() -> None:
    one = entry(key("alice", max_concurrent=2))
    first, _ = ask(one, "alice"), ask(one, "alice")
    with pytest.raises(Refusal) as found:
        ask(one, "alice")
    assert (found.value.status, found.value.code, found.value.retry_after_s) == (429, "concurrency_limit", 1.0)
    first.release()
    ask(one, "alice")


def test_reload_keeps_what_is_left_of_keys_that_stay() -> None:
    alice, bob = key("alice", max_concurrent=1), key("bob", max_concurrent=1)
    one = entry(alice, bob)
    of_alice, of_bob = ask(one, "alice"), ask(one, "bob")
    with pytest.raises(RouterConfigError):
        one.reload(IdentityConfig(keys=(ApiKey(name="n", env="NOT_THERE"),)))
    assert refused(one, "alice") == (429, "concurrency_limit")
    one.reload(IdentityConfig(keys=(alice, key("bob", max_concurrent=2), key("carol"))))
    assert refused(one, "alice") == (429, "concurrency_limit")
    of_alice.release()
    for name in ("alice", "carol", "bob", "bob"):
        ask(one, name)
    of_bob.release()  # counted by the bob of before
    assert refused(one, "bob") == (429, "concurrency_limit")
    one.reload(IdentityConfig())
    everybody = ask(one, None).identity
    one.reload(IdentityConfig())
    assert ask(one, None).identity is everybody


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_a_minute() -> None:
    clock = Clock()
    identity = Identity("alice", Grant(requests_per_minute=2), 1, clock)
    identity.enter("m", 10)
    identity.enter("m", 10)
    with pytest.raises(Refusal, match="requests of this minute") as found:
        identity.enter("m", 10)
    assert (found.value.status, found.value.retry_after_s, identity.active) == (429, 30.0, 2)
    clock.now += 30.0
    identity.enter("m", 10)


def test_tokens_a_minute() -> None:
    clock = Clock()
    identity = Identity("alice", Grant(tokens_per_minute=600, requests_per_minute=5), 1, clock)
    identity.enter("m", 500)
    identity.spend(200)  # the answer
    with pytest.raises(Refusal, match="tokens of this minute") as found:
        identity.enter("m", 1)
    assert found.value.retry_after_s == pytest.approx(10.0)
    clock.now += 10.1
    identity.enter("m", 1)
    assert identity.requests and identity.requests.wait_s(3.5) == 0.0  # what was refused took none


def test_usage_corrects_what_a_prompt_was_estimated_at() -> None:
    one = entry(key("alice", tokens_per_minute=1000))
    request = ask(one, "alice", x="y" * 2000)
    tokens = request.identity.tokens
    before = request.work.prompt_tokens
    assert before > 500
    request.used(100, 50)
    left = 1000 - 100 - 50
    assert tokens.wait_s(left - 5) == 0.0
    assert tokens.wait_s(left + 20) > 0.0


def test_processes_share_limits() -> None:
    identity = Identity("alice", Grant(max_concurrent=5, requests_per_minute=4), 4, Clock())
    identity.enter("m", 1)
    identity.leave()
    with pytest.raises(Refusal, match="requests of this minute"):
        identity.enter("m", 1)
    assert identity.max_concurrent == 2


def test_bucket() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 5.0, clock)
    assert bucket.wait_s(10) == 0.0
    bucket.spend(14)
    assert bucket.wait_s(0) == pytest.approx(2.0)
    assert bucket.wait_s(100) == pytest.approx(7.0)  # until it is full
    clock.now += 1000.0
    assert bucket.wait_s(10) == 0.0
    bucket.spend(-100)
    bucket.spend(10)
    assert bucket.wait_s(1) == pytest.approx(0.5)
