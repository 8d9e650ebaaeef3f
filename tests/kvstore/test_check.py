"""CHECK, asked over a socket of what a store holds."""

import asyncio
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from check_case import HASHER, PAYLOAD, UNIT, daemon, eventually, keys_of, namespace, store_prompt, storing
from deepinfer_kvstore.async_client import AsyncCheckClient
from deepinfer_kvstore.client import CheckClient, exchange
from deepinfer_kvstore.descriptor import Group
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.extra_keys import ExtraKeys, Lora, MultiModal
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.namespaces import Namespace
from deepinfer_kvstore.questions import Answer, Question

BUDGET_SECONDS = 10.0
"""No test here is about time."""
NAME = namespace().directory


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(129_280) for _ in range(length)]


def client(tmp_path: Path, **changes: Any) -> CheckClient:
    return CheckClient(tmp_path / "check.sock", **{"budget_seconds": BUDGET_SECONDS, **changes})


def test_finds_what_is_stored_by_tokens_and_by_hashes(tmp_path: Path) -> None:
    tokens = prompt(10 * UNIT + 3)
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, tokens[: 6 * UNIT])
        asking = client(tmp_path)
        expected = Answer(6 * UNIT, 6 * PAYLOAD, "store")
        assert asking.check(Question(NAME, tokens)) == expected
        assert asking.check(Question(NAME, hashes=HASHER.hashes(tokens))) == expected
        assert asking.check(Question("m", tokens)) == expected  # by the model's name
        assert asking.check(Question(NAME, tokens[UNIT:])) == Answer()
        assert asking.check(Question(NAME, tokens[: UNIT - 1])) == Answer()
        assert not asking.failures
        asking.close()


def test_a_store_with_one_namespace_needs_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(4 * UNIT)
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, tokens)
        asking = client(tmp_path)
        assert asking.check(Question("", tokens)).hit_tokens == 4 * UNIT
        with storing(tmp_path, namespace(model="another")):
            eventually(lambda: asking.check(Question("another", tokens)).reason == "")
            monkeypatch.setattr("deepinfer_kvstore.questions.ONLY_ONE_SECONDS", 0.0)
            eventually(lambda: asking.check(Question("", tokens)) == Answer(reason="namespace"))
        asking.close()


def test_each_part_of_the_key_keeps_prompts_apart(tmp_path: Path) -> None:
    """# lmdeploy#4930: cross-tenant and cross-adapter hits."""
    tokens = prompt(4 * UNIT)
    extras = [
        ExtraKeys(),
        ExtraKeys(salt="a"),
        ExtraKeys(salt="b"),
        ExtraKeys(lora=Lora("l", "/l")),
        ExtraKeys(mm=(MultiModal("cat", 3, 20),)),
        ExtraKeys(mm=(MultiModal("dog", 3, 20),)),
    ]
    with storing(tmp_path) as store, daemon(tmp_path):
        asking = client(tmp_path)
        for number, extra in enumerate(extras):
            answers = asking.check_many([Question(NAME, tokens, extra=other) for other in extras])
            assert [answer.hit_tokens > 0 for answer in answers] == [at < number for at in range(len(extras))]
            store_prompt(store, tokens, extra)
        asking.close()


def test_a_batch_answers_each_by_itself(tmp_path: Path) -> None:
    tokens = prompt(4 * UNIT)
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, tokens)
        asking = client(tmp_path)
        found, unknown, other = asking.check_many(
            [Question(NAME, tokens), Question("0" * 16, tokens), Question(NAME, tokens[::-1])]
        )
        assert found.hit_tokens == 4 * UNIT and other == Answer()
        assert unknown == Answer(reason="namespace")
        assert asking.failures == {"namespace": 1}
        with pytest.raises(ValueError, match="at most 256"):
            asking.check_many([Question(NAME, tokens)] * 257)
        with pytest.raises(ValueError, match="token ids"):
            asking.check(Question(NAME, [-1]))
        assert asking.check(Question(NAME, tokens)).hit_tokens == 4 * UNIT
        long = [*HASHER.hashes(tokens), *[bytes(32)] * 10_000]  # 82 MB of questions
        answers = asking.check_many([Question(NAME, hashes=long)] * 256)
        assert {answer.hit_tokens for answer in answers} == {4 * UNIT}
        asking.close()


def test_hybrid_groups_answer_as_the_engine_will_load(tmp_path: Path) -> None:
    what = namespace(groups=(Group(1, UNIT, PAYLOAD), Group(2, UNIT, PAYLOAD, window_tokens=2 * UNIT)))
    tokens = prompt(8 * UNIT + 1)
    with storing(tmp_path, what) as store, daemon(tmp_path):
        store_prompt(store, tokens)
        asking = client(tmp_path)
        assert asking.check(Question(what.directory, tokens)) == Answer()
        store_prompt(store, tokens[: 5 * UNIT], schema=2)
        assert asking.check(Question(what.directory, tokens)) == Answer(5 * UNIT, 7 * PAYLOAD, "store")
        asking.close()


def test_a_conversation_sends_new_hashes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def spy(connection: Any, frame: bytes, deadline: float) -> Any:
        sent.append(len(frame))
        return exchange(connection, frame, deadline)

    monkeypatch.setattr("deepinfer_kvstore.client.exchange", spy)
    tokens = prompt(400 * UNIT)
    picture = MultiModal("cat", 99 * UNIT + 3, 4 * UNIT)
    with storing(tmp_path) as store, daemon(tmp_path):
        extra = ExtraKeys("salt", mm=(picture,))
        store_prompt(store, tokens[: 300 * UNIT], extra)
        asking = client(tmp_path)
        turns = [
            Question(NAME, tokens[:end], extra=extra, conversation="c") for end in (90 * UNIT + 1, 199 * UNIT, 6400)
        ]
        assert [asking.check(turn).hit_tokens for turn in turns] == [90 * UNIT, 199 * UNIT, 300 * UNIT]
        assert [size // 32 - new in range(8) for size, new in zip(sent[-3:], (90, 109, 201), strict=True)] == [True] * 3
        # The past changed, or is shorter: sent whole, and right.
        edited = [*tokens[:UNIT], 7, *tokens[UNIT + 1 :]]
        assert asking.check(Question(NAME, edited, extra=extra, conversation="c")).hit_tokens == UNIT
        assert asking.check(Question(NAME, tokens[: 2 * UNIT], extra=extra, conversation="c")).hit_tokens == 2 * UNIT
        other = ExtraKeys("salt", mm=(picture._replace(identifier="dog"),))
        assert asking.check(Question(NAME, tokens, extra=extra, conversation="c")).hit_tokens == 300 * UNIT
        assert asking.check(Question(NAME, tokens, extra=other, conversation="c")).hit_tokens == 99 * UNIT
        assert asking.check(Question(NAME, tokens, conversation="c")) == Answer()
        assert not asking.failures
        asking.close()


def test_conversations_of_a_client_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_kvstore.questions.MAX_TURNS", 2)
    tokens = prompt(4 * UNIT)
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, tokens)
        asking = client(tmp_path)
        for name in ("a", "b", "c", "a"):
            assert asking.check(Question(NAME, tokens, conversation=name)).hit_tokens == 4 * UNIT
        assert [name for _, name in asking._questions._turns] == ["c", "a"]
        asking.close()


def test_a_server_that_forgot_a_conversation_gets_it_whole(tmp_path: Path) -> None:
    tokens = prompt(20 * UNIT)
    with storing(tmp_path) as store:
        store_prompt(store, tokens)
        asking = client(tmp_path)
        for length in (10 * UNIT, 15 * UNIT, 20 * UNIT):
            with daemon(tmp_path):  # a new one each turn
                assert asking.check(Question(NAME, tokens[:length], conversation="c")).hit_tokens == length
        assert not asking.failures
        asking.close()


def test_a_ticket_tells_where_blocks_are_and_holds_them_against_collection(tmp_path: Path) -> None:
    """# LMCache#1690: lookup hit, retrieve 0."""
    tokens = prompt(5 * UNIT)
    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, tokens)
        before = [entry for entry in store.index.get_many(keys_of(tokens)) if entry]
        asking = client(tmp_path)
        answer = asking.check(Question(NAME, tokens, ticket_seconds=600))
        assert len(answer.ticket) == 16
        assert asking.check(Question(NAME, tokens)).ticket == b""
        assert asking.check(Question(NAME, tokens[::-1], ticket_seconds=600)).ticket == b""
        told = asking.redeem(answer.ticket)
        assert told is not None and told.namespace == NAME and 500 < told.seconds <= 600
        assert [key for key, _ in told.blocks] == keys_of(tokens)
        assert [entry.location for _, entry in told.blocks] == [entry.location for entry in before]

        def deepest() -> Entry:
            (entry,) = store.index.get_many(keys_of(tokens)[-1:])
            assert entry
            return entry

        # The collector leaves what is used in the future, and all blocks before it.
        eventually(lambda: deepest().touched_ms > before[-1].touched_ms + 590_000)
        assert deepest().location == before[-1].location
        asking.release(answer.ticket)
        assert asking.redeem(answer.ticket) is None
        asking.close()


def test_over_an_erasure_coded_store_that_loses_roots(tmp_path: Path) -> None:
    roots = tuple(tmp_path / ("root" if number == 0 else f"disk{number}") for number in range(6))
    tokens = prompt(6 * UNIT)
    with storing(tmp_path, ec="4+2", roots=roots) as store:
        store_prompt(store, tokens)
    for lost in ((), (1, 4), (0, 2)):
        for number in lost:
            roots[number].rename(tmp_path / f"lost{number}")
        shutil.rmtree(tmp_path / "index", ignore_errors=True)  # so that the journals are read
        with daemon(tmp_path, more_roots=roots[1:]) as running:
            asking = client(tmp_path)
            (found,) = running.namespaces.all()
            eventually(lambda asking=asking: asking.check(Question(NAME, tokens)).hit_tokens == 6 * UNIT)
            asking.check(Question(NAME, tokens, ticket_seconds=600))
            eventually(lambda found=found: pinned(found, keys_of(tokens)[-1]))
            asking.close()
        for number in lost:
            (tmp_path / f"lost{number}").rename(roots[number])
    with pytest.raises(StoreConfigError, match="needs 6"), daemon(tmp_path):
        pass


def pinned(namespace: Namespace, key: Key) -> bool:
    (entry,) = namespace.index.get_many([key])
    return entry is not None and entry.touched_ms > time.time() * 1000 + 300_000


def test_from_an_event_loop(tmp_path: Path) -> None:
    tokens = prompt(9 * UNIT)

    async def ask() -> tuple[list[Answer], dict[str, int]]:
        asking = AsyncCheckClient(tmp_path / "check.sock", budget_seconds=BUDGET_SECONDS)
        turns = [asking.check(Question(NAME, tokens[: n * UNIT], conversation=str(n))) for n in range(1, 10)]
        answers = list(await asyncio.gather(*turns))
        answers.append(await asking.check(Question(NAME, tokens * 300)))  # hashed in a thread
        answers += await asking.check_many([Question("none", tokens)])
        await asking.close()
        answers.append(await asking.check(Question(NAME, tokens)))
        return answers, asking.failures

    with storing(tmp_path) as store, daemon(tmp_path):
        store_prompt(store, tokens)
        answers, failures = asyncio.run(ask())
    assert [answer.hit_tokens for answer in answers] == [*(n * UNIT for n in range(1, 10)), 9 * UNIT, 0, 0]
    assert failures == {"namespace": 1, "unreachable": 1}
