"""Prefill, decode and encoding at engines of their own: what each is asked, and that nothing is left behind."""

import asyncio
import contextlib
import struct
from base64 import b64encode
from typing import Any

import orjson
import pytest
from routed import COMPLETIONS, LONG, Routed, routed, run, until
from scripted_engine import Act, Asked, answer, broken, completion, generates, in_turn, prefilled
from scripted_stream import told

from deepinfer_router.api import CHAT as CHAT_API
from deepinfer_router.api import COMPLETION, GENERATE, MESSAGES, RESPONSES
from deepinfer_router.body_patch import DROP
from deepinfer_router.encoder import EncoderPolicy
from deepinfer_router.engine_state import EngineState
from deepinfer_router.failover import DENIED, FAILURES
from deepinfer_router.handover import TwoStep
from deepinfer_router.handover_mooncake import Mooncake, bootstrap_url
from deepinfer_router.media import Encoded, encoder_body, media_parts
from deepinfer_router.prefill_body import prefill_changes
from deepinfer_router.roles import Role
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

IDS = [0, 1, 0, 1, 1, 0]
MESSAGE = [{"role": "user", "content": LONG}]
NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e1",
    "remote_block_ids": [[1, 2]],
    "remote_host": "h",
    "remote_port": 1,
}


def of(router: Routed, number: int) -> list[Asked]:
    return router.engines[number].asked


# --- bodies


def test_a_prefill_keeps_the_prompt_and_drops_what_shapes_the_answer() -> None:
    """production-stack#747: fields that are absent stay absent."""
    fields = {
        "messages": MESSAGE,
        "tools": [{}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 900,
        "min_tokens": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "stop": ["x"],
    }
    assert prefill_changes(CHAT_API, fields) == {
        "stream": False,
        "stream_options": DROP,
        "min_tokens": DROP,
        "n": DROP,
        "logprobs": DROP,
        "top_logprobs": DROP,
        "max_completion_tokens": 1,
    }
    assert prefill_changes(CHAT_API, {"messages": MESSAGE}) == {"max_tokens": 1}
    assert prefill_changes(RESPONSES, {"input": "x", "stream": True}) == {"max_output_tokens": 1, "stream": False}
    assert prefill_changes(CHAT_API, fields, never_stop=True)["stop"] is DROP
    assert prefill_changes(COMPLETION, {"prompt": "x"}, never_stop=True) == {"max_tokens": 1, "ignore_eos": True}


def test_sampling_parameters_of_token_requests_are_changed_where_they_are() -> None:
    fields = {
        "token_ids": [1],
        "sampling_params": {"max_tokens": 9, "min_tokens": 2, "temperature": 0.5},
        "stream": True,
    }
    assert prefill_changes(GENERATE, fields) == {
        "stream": False,
        "sampling_params": {"max_tokens": 1, "temperature": 0.5},
    }


@pytest.mark.parametrize(
    ("fields", "store", "nixl"),
    [
        ({"prompt": "x"}, True, True),
        ({"prompt": [1, 2]}, True, True),
        ({"prompt": "x", "n": 2}, True, False),
        ({"prompt": "x", "prompt_logprobs": 0}, False, False),
        ({"prompt": "x", "echo": True}, False, False),
        ({"prompt": ["x", "y"]}, False, False),
        ({"prompt": "x", "use_beam_search": True}, False, False),
    ],
)
def test_which_requests_can_be_split(fields: dict[str, Any], store: bool, nixl: bool) -> None:
    """vllm-ascend#13363: prompt logprobs are not to be had from an engine that did not compute the prompt."""
    assert TwoStep(reusable=True).splits(COMPLETION, fields) is store
    assert TwoStep(reusable=False).splits(COMPLETION, fields) is nixl
    assert Mooncake(8998).splits(COMPLETION, fields) is nixl
    assert not Mooncake(8998).splits(MESSAGES, fields)


def test_the_decode_gets_the_prefills_answer_beside_the_routers_own() -> None:
    ours = {"kvstore": {"tenant": "t", "ticket": "k"}}
    answer = {**NIXL, "kvstore": {"stored_tokens": 640}}
    target = Target(Engine("p", "http://p:1"))
    assert TwoStep(reusable=True).decode(ours, answer, "", target) == {
        **NIXL,
        "kvstore": {"tenant": "t", "ticket": "k", "stored_tokens": 640},
    }
    assert TwoStep(reusable=True).decode(ours, {}, "", target) == ours


# --- two steps


def test_a_prompt_is_computed_at_one_engine_and_continued_at_another() -> None:
    async def main() -> None:
        async with routed(prefill=[prefilled(NIXL, cached_tokens=5)], decode=[generates(IDS)]) as router:
            reply = await router.ask(
                messages=MESSAGE, stream=True, stream_options={"include_usage": True}, max_tokens=50, min_tokens=2
            )
            assert told(reply.events)[0] == "a worda word worda"
            (asked,), (continued,) = of(router, 0), of(router, 1)
            assert asked.body["kv_transfer_params"]["do_remote_decode"] is True
            assert asked.body["kv_transfer_params"]["do_remote_prefill"] is False
            assert (asked.body["max_tokens"], asked.body["stream"]) == (1, False)
            assert not {"stream_options", "min_tokens"} & asked.body.keys()
            assert asked.body["messages"] == MESSAGE
            assert continued.body == {
                "model": "m",
                "messages": MESSAGE,
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": 50,
                "min_tokens": 2,
                "kv_transfer_params": NIXL,
            }
            assert asked.headers["x-request-id"] == continued.headers["x-request-id"]
            await router.settled()

    run(main)


@pytest.mark.parametrize("streams", [True, False])
def test_cached_tokens_are_the_prefills(streams: bool) -> None:
    """vllm-project/router#193: the decode engine calls all of the prompt cached."""

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}
        if not asked.body.get("stream"):
            return await answer(completion(asked) | {"usage": usage})(asked, writer)
        last = b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n"
        first = b'data: {"choices":[{"delta":{"content":"\\"cached_tokens\\":9"}}]}\n\n'
        return await answer(first + last, headers={"content-type": "text/event-stream"})(asked, writer)

    async def main() -> None:
        async with routed(prefill=[prefilled(cached_tokens=4)], decode=[act]) as router:
            options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
            reply = await router.ask(messages=MESSAGE, **options)
            assert b'"cached_tokens":4' in reply.body
            assert reply.body.count(b'cached_tokens":9') == 0
            if streams:
                assert told(reply.events)[0] == '"cached_tokens":9'
            await router.settled()

    run(main)


@pytest.mark.parametrize(
    "fields", [{"messages": [{"role": "user", "content": "hi"}]}, {"messages": MESSAGE, "prompt_logprobs": 1}]
)
def test_a_small_prompt_or_one_whose_logits_are_wanted_is_computed_where_it_is_continued(
    fields: dict[str, Any],
) -> None:
    async def main() -> None:
        async with routed(prefill=[prefilled(NIXL)], decode=[generates(IDS)]) as router:
            assert (await router.ask(**fields)).status == 200
            assert (len(of(router, 0)), len(of(router, 1))) == (0, 1)
            assert "kv_transfer_params" not in of(router, 1)[0].body
            await router.settled()

    run(main)


@pytest.mark.parametrize("how", ["reset", "close", 500])
def test_a_prefill_that_fails_is_made_at_another_engine(how: str | int) -> None:
    act = broken(how) if isinstance(how, str) else answer({}, how)

    async def main() -> None:
        shared = in_turn(act, prefilled(NIXL))
        async with routed(prefill=[shared, shared], decode=[generates(IDS)]) as router:
            assert (await router.ask(messages=MESSAGE)).status == 200
            assert [len(of(router, number)) for number in range(3)] == [1, 1, 1]
            assert of(router, 2)[0].body["kv_transfer_params"] == NIXL
            await router.settled()

    run(main)


def test_of_two_prefills_that_fail_the_client_is_told_and_all_is_counted_once() -> None:
    async def main() -> None:
        second, reset = DENIED.labels("second"), FAILURES.labels("reset")
        before = second.value, reset.value
        async with routed(prefill=[broken("reset")] * 2, decode=[generates(IDS)]) as router:
            reply = await router.ask(messages=MESSAGE)
            assert (reply.status, reply.error["code"]) == (502, "upstream_lost")
            assert of(router, 2) == []
            await router.settled()
        assert (second.value - before[0], reset.value - before[1]) == (1, 2)

    run(main)


@pytest.mark.parametrize("how", [503, 400])
def test_a_stream_that_nobody_prefills_again_ends_with_an_error(how: int) -> None:
    async def main() -> None:
        shared = in_turn(prefilled(NIXL), answer({"error": {"message": "no"}}, how))
        cut = generates(IDS, until=3, then="close")
        async with routed(prefill=[shared, shared], decode=[cut, cut], failure={"resume": True}) as router:
            reply = await router.ask(messages=MESSAGE, stream=True)
            assert (reply.status, reply.whole) == (200, False)
            assert reply.error["code"] == "upstream_lost"
            await router.settled()

    run(main)


def test_without_another_prefill_engine_the_decode_engine_does_it() -> None:
    async def main() -> None:
        async with routed(prefill=[broken("reset")], decode=[generates(IDS)]) as router:
            assert (await router.ask(messages=MESSAGE)).status == 200
            assert "kv_transfer_params" not in of(router, 1)[0].body
            await router.settled()

    run(main)


def test_what_the_prefill_refuses_the_client_is_told() -> None:
    async def main() -> None:
        async with routed(prefill=[answer({"error": {"message": "bad"}}, 400)], decode=[generates(IDS)]) as router:
            reply = await router.ask(messages=MESSAGE, stream=True)
            assert (reply.status, reply.error["message"]) == (400, "bad")
            assert of(router, 1) == []
            await router.settled()

    run(main)


def test_nonsense_of_a_prefill_engine_only_costs_its_work() -> None:
    async def main() -> None:
        for said in (b"no json", b"[]", b'{"kv_transfer_params": 3, "usage": 4}', b"{}"):
            async with routed(prefill=[answer(said)], decode=[generates(IDS)]) as router:
                assert (await router.ask(messages=MESSAGE)).status == 200
                await router.settled()

    run(main)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_client_that_leaves_between_prefill_and_decode_strands_nothing(pinned: bool) -> None:
    """vllm#50425: blocks of the prefill stayed for 480 s, for no decode engine ever came for them."""
    blocked = asyncio.Event()

    async def main() -> None:
        async with routed(prefill=[prefilled(NIXL if pinned else None)], decode=[broken("stall")]) as router:
            upstream = router.app.upstreams.of(next(t.engine for t in router.targets if "decode" in t.engine.id))
            connect = upstream.open

            async def slow_connect(protocol: Any) -> Any:
                blocked.set()
                await asyncio.sleep(0.3)
                return await connect(protocol)

            upstream.open = slow_connect  # type: ignore[method-assign]
            _, writer = await router.send(messages=MESSAGE, stream=True)
            await asyncio.wait_for(blocked.wait(), 10)
            assert of(router, 1) == []
            writer.transport.abort()
            if pinned:
                await until(lambda: len(of(router, 1)) == 1)
                assert of(router, 1)[0].body["kv_transfer_params"] == NIXL
                assert of(router, 1)[0].body["stream"] is True
            await router.settled()
            await asyncio.sleep(0.5)
            assert len(of(router, 1)) == pinned

    run(main)


def test_a_client_that_leaves_during_the_prefill_leaves_that_too() -> None:
    async def main() -> None:
        async with routed(prefill=[broken("stall")], decode=[generates(IDS)]) as router:
            _, writer = await router.send(messages=MESSAGE)
            await until(lambda: bool(of(router, 0)))
            writer.transport.abort()
            await until(lambda: of(router, 0)[0].left)
            await router.settled()
            assert of(router, 1) == []

    run(main)


# --- Mooncake


@contextlib.asynccontextmanager
async def bootstrap(ids: dict[str, Any]) -> Any:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = orjson.dumps(ids)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def mooncake(port: int) -> dict[str, Any]:
    return {"connector": "mooncake", "mooncake_bootstrap_port": port}


def test_mooncake_asks_both_at_once() -> None:
    async def main() -> None:
        both = asyncio.Barrier(2)

        def meets(act: Act) -> Act:
            async def met(asked: Asked, writer: asyncio.StreamWriter) -> bool:
                await both.wait()
                return await act(asked, writer)

            return met

        async with (
            bootstrap({"0": {"engine_id": "engine-a", "worker_addr": {}}}) as port,
            routed(
                prefill=[meets(prefilled())], decode=[meets(generates(IDS))], disaggregation=mooncake(port)
            ) as router,
        ):
            reply = await router.ask(messages=MESSAGE, stream=True, stop=["never"])
            assert reply.whole
            (asked,), (continued,) = of(router, 0), of(router, 1)
            transfer = asked.body["kv_transfer_params"].pop("transfer_id")
            assert asked.body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
            assert asked.body["ignore_eos"] is True
            assert "stop" not in asked.body
            assert continued.body["kv_transfer_params"] == {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "transfer_id": transfer,
                "remote_engine_id": "engine-a",
                "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
            }
            assert continued.body["stop"] == ["never"]
            await router.settled()

    run(main)


@pytest.mark.parametrize("how", [broken("reset"), answer({"error": {"message": "no"}}, 500)])
def test_mooncake_does_not_wait_for_a_prefill_that_failed(how: Act) -> None:
    async def main() -> None:
        shared = in_turn(how, prefilled())
        waits = in_turn(broken("stall"), generates(IDS))
        async with (
            bootstrap({"0": {"engine_id": "a"}}) as port,
            routed(prefill=[shared, shared], decode=[waits], disaggregation=mooncake(port)) as router,
        ):
            reply = await router.ask(messages=MESSAGE, stream=True)
            assert told(reply.events)[0] == "a worda word worda"
            assert of(router, 2)[0].left
            assert len(of(router, 2)) == 2
            await router.settled()

    run(main)


def test_mooncake_prefills_that_are_rejected_are_nobodys_fault() -> None:
    """sglang#25811: prompts that were too long opened circuits."""

    async def main() -> None:
        async with (
            bootstrap({"0": {"engine_id": "a"}}) as port,
            routed(
                prefill=[answer({"error": {"message": "too long"}}, 400)] * 2,
                decode=[broken("stall")],
                disaggregation=mooncake(port),
            ) as router,
        ):
            for _ in range(5):
                reply = await router.ask(messages=MESSAGE)
                assert (reply.status, reply.error["message"]) == (400, "too long")
            assert len(of(router, 0)) + len(of(router, 1)) == 5
            assert {target.engine.state for target in router.targets} == {EngineState.READY}
            await router.settled()

    run(main)


def test_without_a_bootstrap_server_the_decode_engine_does_all() -> None:
    async def main() -> None:
        async with (
            bootstrap({"5": {"engine_id": "a"}}) as port,
            routed(prefill=[prefilled()], decode=[generates(IDS)], disaggregation=mooncake(port)) as router,
        ):
            assert (await router.ask(messages=MESSAGE)).status == 200
            assert of(router, 0) == []
            assert "kv_transfer_params" not in of(router, 1)[0].body
            await router.settled()

    run(main)


def test_a_bootstrap_server_is_where_its_engine_is() -> None:
    assert bootstrap_url(Engine("a", "https://host:8000"), 8998) == "http://host:8998"
    assert bootstrap_url(Engine("a", "http://[::1]:8000"), 8998) == "http://[::1]:8998"


# --- encoders


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def with_images(*names: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": LONG}, *map(image, names)]}]


def encodes() -> Act:
    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        ((part,),) = (message["content"] for message in asked.body["messages"])
        name = part["image_url"]["url"].rpartition(",")[2]
        return await answer({"ec_transfer_params": {name: {"metadata": {}}}})(asked, writer)

    return act


def test_images_are_encoded_one_by_one_before_their_prompt_and_remembered() -> None:
    async def main() -> None:
        async with routed(prefill=[prefilled()], decode=[generates(IDS)], encode=[encodes()]) as router:
            await router.ask(messages=with_images("AA", "BB"))
            encoded = of(router, 2)
            assert [asked.body["messages"] for asked in encoded] == [
                [{"role": "user", "content": [image(name)]}] for name in ("AA", "BB")
            ]
            assert all((asked.body["max_tokens"], asked.body["stream"]) == (1, False) for asked in encoded)
            both = {"AA": {"metadata": {}}, "BB": {"metadata": {}}}
            assert of(router, 0)[0].body["ec_transfer_params"] == both
            assert of(router, 0)[0].body["messages"] == with_images("AA", "BB")
            await router.ask(messages=with_images("BB", "CC"))
            assert len(encoded) == 3
            assert of(router, 0)[1].body["ec_transfer_params"] == {"BB": {"metadata": {}}, "CC": {"metadata": {}}}
            await router.settled()

    run(main)


@pytest.mark.parametrize("how", [broken("reset"), answer({}, 503), answer({}, 400), answer(b"nonsense")])
def test_an_encoder_that_fails_costs_no_request(how: Act) -> None:
    async def main() -> None:
        async with routed(prefill=[prefilled()], decode=[generates(IDS)], encode=[how, how]) as router:
            assert (await router.ask(messages=with_images("AA"))).status == 200
            assert "ec_transfer_params" not in of(router, 0)[0].body
            await router.settled()

    run(main)


def test_encoders_serve_engines_that_do_the_rest_alone() -> None:
    async def main() -> None:
        async with routed([generates(IDS)], encode=[encodes()]) as router:
            assert (await router.ask(messages=with_images("AA"))).status == 200
            assert of(router, 0)[0].body["ec_transfer_params"] == {"AA": {"metadata": {}}}
            await router.settled()

    run(main)


def test_a_client_that_leaves_during_the_encoding_leaves_that_too() -> None:
    async def main() -> None:
        async with routed(prefill=[prefilled()], decode=[generates(IDS)], encode=[broken("stall")]) as router:
            _, writer = await router.send(messages=with_images("AA", "BB"))
            await until(lambda: len(of(router, 2)) == 2)
            writer.transport.abort()
            await until(lambda: all(asked.left for asked in of(router, 2)))
            await router.settled()
            assert of(router, 0) == of(router, 1) == []

    run(main)


def test_an_image_weighs_what_its_file_says() -> None:
    png = b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 4000, 5000)).decode()

    async def main() -> None:
        async with routed([generates(IDS)], encode=[broken("stall")]) as router:
            _, writer = await router.send(messages=with_images(png))
            encoder = next(target for target in router.targets if Role.ENCODE in target.engine.roles)
            await until(lambda: encoder.active == 1)
            assert encoder.pending_seconds == pytest.approx(EncoderPolicy().seconds(Work(images=1, pixels=20_000_000)))
            writer.transport.abort()
            await router.settled()

    run(main)


def test_media_are_found_in_every_api_and_in_results_of_tools() -> None:
    deep = {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image", "source": {}}]}]}
    assert media_parts(MESSAGES, {"messages": [deep]}) == [{"type": "image", "source": {}}]
    assert media_parts(CHAT_API, {"messages": with_images("A", "B")}) == [image("A"), image("B")]
    assert media_parts(RESPONSES, {"input": "text"}) == []
    body = orjson.loads(
        encoder_body(RESPONSES, {"model": "m", "mm_processor_kwargs": {"a": 1}}, {"type": "input_image"})
    )
    assert body == {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_image"}]}],
        "max_output_tokens": 1,
        "stream": False,
        "mm_processor_kwargs": {"a": 1},
    }


def test_encodings_are_forgotten_in_time_and_in_number() -> None:
    encoded = Encoded(most=2, keep_s=10)
    for number, body in enumerate((b"a", b"b", b"c")):
        encoded.keep(body, {"n": number}, now=0.0)
    assert [encoded.find(body, 1.0) for body in (b"a", b"b", b"c")] == [None, {"n": 1}, {"n": 2}]
    assert encoded.find(b"b", 10.0) is None
    assert len(encoded) == 1
    nothing = Encoded(most=0, keep_s=10)
    nothing.keep(b"a", {}, 0.0)
    assert nothing.find(b"a", 0.0) is None


def test_completions_are_split_too() -> None:
    async def main() -> None:
        async with routed(prefill=[prefilled(NIXL)], decode=[generates(IDS)]) as router:
            reply = await router.ask(COMPLETIONS, prompt=LONG, stream=True, max_tokens=10)
            assert told(reply.events)[0] == "a worda word worda"
            assert of(router, 0)[0].path == COMPLETIONS
            await router.settled()

    run(main)


def test_other_requests_go_to_one_engine() -> None:
    async def main() -> None:
        async with routed(prefill=[answer({"data": []})], decode=[generates(IDS)]) as router:
            assert (await router.ask("/v1/embeddings", input=LONG)).json == {"data": []}
            assert (len(of(router, 0)), len(of(router, 1))) == (1, 0)
            await router.settled()

    run(main)
