"""What is counted of requests through the whole router."""

import asyncio

from routed import CHAT, COMPLETIONS, routed, run, until
from scripted_engine import answer, streamed
from scripted_stream import stream

from deepinfer_router import observer
from deepinfer_router.api import Kind
from deepinfer_router.observer import CLIENT_LEFT


def requests(api: str, status: int) -> float:
    return observer.REQUESTS.labels(api, str(status)).value


def observed(family: str, api: str) -> int:
    return sum(getattr(observer, family).labels(api).counts)


def test_requests_are_counted_by_api_and_status() -> None:
    before = [requests("chat", 200), requests("completion", 200), requests("chat", 400), observed("DURATION", "chat")]

    async def main() -> None:
        async with routed([answer()]) as router:
            await router.ask()
            await router.ask(COMPLETIONS)
            await router.ask(CHAT, model=7)

    asyncio.run(main())
    now = [requests("chat", 200), requests("completion", 200), requests("chat", 400), observed("DURATION", "chat")]
    assert [after - was for after, was in zip(now, before, strict=True)] == [1, 1, 1, 2]


def test_the_first_token_of_a_stream_is_timed() -> None:
    before = observed("FIRST_TOKEN", "chat")

    async def main() -> None:
        async with routed([streamed(stream(Kind.CHAT, [1, 2], [0, 1, 0], with_ids=False))]) as router:
            await router.ask(stream=True)

    asyncio.run(main())
    assert observed("FIRST_TOKEN", "chat") == before + 1


def test_a_client_that_left_before_its_answer_is_a_499() -> None:
    before = requests("chat", CLIENT_LEFT)

    async def main() -> None:
        never = asyncio.Event()

        async def silent(asked: object, writer: object) -> bool:
            await never.wait()
            return False

        async with routed([silent]) as router:
            _, writer = await router.send()
            await until(lambda: bool(router.engines[0].asked))
            writer.close()
            await until(lambda: requests("chat", CLIENT_LEFT) == before + 1)
            await router.settled()

    run(main)


def test_tokens_are_counted_by_tenant() -> None:
    identity = {"everybody": {"tenant": "blue"}}
    before = observer.TENANT_TOKENS.labels("blue").value

    async def main() -> None:
        async with routed([answer()], identity=identity) as router:
            await router.ask(COMPLETIONS, prompt=[1, 2, 3, 4, 5])

    asyncio.run(main())
    assert observer.TENANT_TOKENS.labels("blue").value == before + 5
