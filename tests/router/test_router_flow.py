"""Requests through the whole router to engines that do what the test says."""

import asyncio

from routed import routed
from scripted_engine import answer, streamed
from scripted_stream import stream, told

from deepinfer_router.api import Kind


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
