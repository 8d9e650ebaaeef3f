"""A router in front of scripted engines, in this process, and a client that sees every byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
from scripted_engine import Act, Engine

from deepinfer_router.app import App
from deepinfer_router.config import RouterConfig
from deepinfer_router.http_server import HttpServer
from deepinfer_router.target import Target

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = "word " * 3000
"""A prompt that is not computed at a decode engine."""


class Reply:
    """What a client got."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.whole = False
        """With the end that HTTP gives it."""

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        return [event + b"\n\n" for event in self.body.split(b"\n\n")[:-1]]

    @property
    def error(self) -> dict[str, Any]:
        """Of a body, or of a stream's last event."""
        text = self.events[-1].split(b"data: ", 1)[1] if self.events else self.body
        found: dict[str, Any] = orjson.loads(text)["error"]
        return found


class Routed:
    """The router of a test, its engines and ways to ask it."""

    def __init__(self, app: App, server: HttpServer, port: int, engines: Sequence[Engine]) -> None:
        self.app = app
        self.server = server
        self.port = port
        self.engines = engines

    @property
    def targets(self) -> list[Target]:
        return [target for engine in self.app.fleet.engines.values() for target in engine.targets]

    async def ask(
        self, path: str = CHAT, headers: dict[str, str] | None = None, *, method: str = "POST", **fields: Any
    ) -> Reply:
        """A request of a client that waits for everything."""
        reader, writer = await self.send(path, headers, method=method, **fields)
        try:
            return await read_reply(reader)
        finally:
            writer.close()

    async def send(
        self, path: str = CHAT, headers: dict[str, str] | None = None, *, method: str = "POST", **fields: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request whose answer is for the test to read."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
        body = json.dumps({"model": "m", **prompt, **fields}).encode()
        lines = {"host": "router", "content-length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        await writer.drain()
        return reader, writer

    async def settled(self) -> None:
        """Wait until no engine has anything of ours; fails if that never comes."""
        for _ in range(2000):
            if all(t.active == t.kv_tokens == t.held_tokens == 0 and t.pending_seconds == 0 for t in self.targets):
                return
            await asyncio.sleep(0.01)
        raise AssertionError([(t.engine.id, t.active, t.kv_tokens, t.pending_seconds) for t in self.targets])


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A test on an event loop of its own; a minute is for machines that are busy."""
    asyncio.run(asyncio.wait_for(main(), 60))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; half a minute is for machines that are busy."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """An answer to its end, or to where it breaks off."""
    reply = Reply()
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return reply
    line, *rest = head.split("\r\n")
    reply.status = int(line.split(" ")[1])
    reply.headers = {n.lower(): v.strip() for n, _, v in (each.partition(":") for each in rest if each)}
    try:
        if "content-length" in reply.headers:
            reply.body = await reader.readexactly(int(reply.headers["content-length"]))
        else:
            while size := int(await reader.readline(), 16):
                reply.body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        reply.whole = True
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        pass
    return reply


@asynccontextmanager
async def routed(
    acts: Sequence[Act] | None = None,
    *,
    prefill: Sequence[Act] = (),
    decode: Sequence[Act] = (),
    encode: Sequence[Act] = (),
    ranks: int = 1,
    **config: Any,
) -> AsyncIterator[Routed]:
    """Engines that do both, or that do one each."""
    roles = [(act, ["prefill", "decode"]) for act in acts or ()]
    roles += [(act, ["prefill"]) for act in prefill]
    roles += [(act, ["decode"]) for act in decode]
    roles += [(act, ["encode"]) for act in encode]
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(act)) for act, _ in roles]
        listed = [
            {"url": engine.url, "roles": role, "ranks": ranks, "id": f"{'-'.join(role)}-{number}"}
            for number, (engine, (_, role)) in enumerate(zip(engines, roles, strict=True))
        ]
        app = App(RouterConfig.model_validate({"engines": listed, **config}), seed=1)
        await app.start()
        stack.push_async_callback(app.close)
        server = HttpServer(app.handle, app.config.http.limits, gate=app.gate)
        port = await server.listen("127.0.0.1", 0)
        stack.push_async_callback(server.drain, 0)
        yield Routed(app, server, port, engines)
