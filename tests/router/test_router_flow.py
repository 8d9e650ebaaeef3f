"""Requests through the whole router to engines that do what the test says."""

import asyncio

from routed import CHAT, LONG, Routed, routed
from scripted_engine import Act, answer, broken, generates, prefilled, streamed
from scripted_stream import stream, told

from deepinfer_router.api import Kind
from deepinfer_router.engine_spec import EngineSpec


def test_an_answer_comes_as_the_engine_gave_it() -> None:
    async def main() -> None:
        async with routed([answer()]) as router:
            reply = await router.ask(headers={"x-request-id": "mine"}, user="u")
            assert (reply.status, reply.whole) == (200, True)
            assert reply.json["choices"][0]["message"]["content"] == "fine"
            asked = router.engines[0].asked[0]
            assert asked.headers["x-request-id"] == "mine"
            assert asked.body["user"] == "u"
            await router.settled()

    asyncio.run(main())


def codings(router: Routed) -> list[str]:
    """Which codings engines were told they may use."""
    return [asked.headers.get("accept-encoding", "") for engine in router.engines for asked in engine.asked]


def test_answers_that_are_read_on_the_way_are_asked_for_without_a_coding() -> None:
    """A gateway before an engine may compress for a client that takes it; what is relayed as bytes stays so."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    takes = {"accept-encoding": "gzip, deflate"}

    async def main() -> None:
        async with routed([generates([0, 1])]) as router:
            for headers in (takes, {**takes, "x-resume": "true"}):
                assert (await router.ask(headers=headers, stream=True)).whole
            assert codings(router) == ["gzip, deflate", "identity"]
            await router.settled()
        encoder = answer({"ec_transfer_params": {"a": {}}})
        async with routed(prefill=[prefilled()], decode=[generates([0, 1])], encode=[encoder]) as router:
            content = [{"type": "text", "text": LONG}, image]
            assert (await router.ask(headers=takes, messages=[{"role": "user", "content": content}])).whole
            assert codings(router) == ["identity"] * 3
            await router.settled()

    asyncio.run(main())


def test_a_stream_comes_byte_for_byte() -> None:
    events = stream(Kind.CHAT, [1, 2], [0, 1, 0], with_ids=False)

    async def main() -> None:
        async with routed([streamed(events)]) as router:
            reply = await router.ask(stream=True)
            assert reply.body == b"".join(events)
            assert reply.whole
            await router.settled()

    asyncio.run(main())
    assert told(events)[2]


def test_the_port_itself_says_whether_there_is_an_engine() -> None:
    async def main() -> None:
        async with routed([answer()]) as router:
            assert (await router.ask("/health")).status == 200
            router.app.fleet.drain(router.targets[0].engine.id)
            assert (await router.ask("/health")).status == 503
            assert router.engines[0].asked == []

    asyncio.run(main())


def test_a_websocket_goes_through_and_is_counted_until_it_ends() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"websocket" not in head:
            writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            assert b"authorization" not in head.lower()
            writer.write(b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
            while data := await reader.read(100):
                writer.write(data.upper())
        writer.close()

    async def main() -> None:
        engine = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with engine, routed([answer()]) as router:
            url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
            router.app.fleet.remove(router.targets[0].engine.id)
            router.app.fleet.alive(router.app.fleet.add(EngineSpec(url)))
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nauthorization: Bearer mine\r\n"
            writer.write(b"GET /v1/realtime HTTP/1.1\r\nhost: r\r\n" + upgrade + b"\r\n")
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"spoken")
            assert await reader.readexactly(6) == b"SPOKEN"
            target = router.targets[0]
            assert (target.active, target.pending_seconds) == (1, 0)  # open for hours, it would pass for a prefill
            writer.close()
            await router.settled()

    asyncio.run(main())


def test_models_of_all_kinds_of_engines_are_listed_once() -> None:
    def serving(*names: str) -> Act:
        return answer({"object": "list", "data": [{"id": name, "owned_by": names[0]} for name in names]})

    async def main() -> None:
        acts = [serving("a", "both"), serving("a", "both"), serving("b", "both"), broken("reset")]
        async with routed(acts) as router:
            engines = list(router.app.fleet.engines.values())
            reply = await router.ask("/v1/models", method="GET")
            assert len(reply.json["data"]) == 2  # all alike: what one of them says
            for engine, models in zip(engines, (("a",), ("a",), ("b",), ("c",)), strict=True):
                engine.models = models
            router.app.fleet.changed()
            reply = await router.ask("/v1/models", method="GET")
            assert [entry["id"] for entry in reply.json["data"]] == ["a", "both", "b"]
            assert codings(router).count("identity") == 3
            await router.settled()

    asyncio.run(main())


def test_a_body_with_an_upgrade_is_read_like_any() -> None:
    """It would else reach an engine as the client wrote it: with another's salt, and past limits."""

    async def main() -> None:
        async with routed([answer()], identity={"everybody": {"cache_salt": "s"}}) as router:
            for protocol in ("websocket", "h2c"):
                asked = await router.ask(headers={"connection": "upgrade", "upgrade": protocol}, cache_salt="other")
                assert asked.status == 200
                assert router.engines[0].asked_on(CHAT)[-1].body["cache_salt"] == "s"

    asyncio.run(main())
