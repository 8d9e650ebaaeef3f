"""An engine that does what a test says: raw sockets, so that it can also break off, reset, stall and fall silent."""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from scripted_stream import pieces, stream

from deepinfer_router.api import Kind

Headers = dict[str, str]


class Asked:
    """One request as the engine got it."""

    def __init__(self, path: str, headers: Headers, body: bytes) -> None:
        self.path = path
        self.headers = headers
        self.raw = body
        self.body: dict[str, Any] = json.loads(body) if body.startswith(b"{") else {}
        self.left = False
        """Whoever asked has gone before the answer was whole."""
        self.over = False
        """The engine does nothing for it any more."""


class Engine:
    """Listens on a port of loopback; `act` answers. Use `async with`."""

    def __init__(self, act: "Act") -> None:
        self.act = act
        self.asked: list[Asked] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Engine":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_listening(self) -> None:
        """New connections are refused; those that there are stay."""
        assert self._server is not None
        self._server.close()

    def asked_on(self, path: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.path == path]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and await self._answer(head, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line, *rest = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in rest if each)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(line.split(" ")[1], headers, body)
        if asked.path in ("/health", "/metrics"):
            await answer({}, 200 if asked.path == "/health" else 404, {"connection": "close"})(asked, writer)
            return False  # so that the requests of a test find no connection in the pool
        if asked.path == "/detokenize":
            return await answer({"prompt": "".join(pieces(asked.body["tokens"]))})(asked, writer)
        self.asked.append(asked)
        acting = asyncio.ensure_future(self.act(asked, writer))
        gone = asyncio.ensure_future(reader.read(1))  # nothing more comes before the answer, but the end
        done, _ = await asyncio.wait((acting, gone), return_when=asyncio.FIRST_COMPLETED)
        asked.over = True
        if acting not in done:
            asked.left = True
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)
            return False
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return acting.result()


Act = Callable[[Asked, asyncio.StreamWriter], Awaitable[bool]]
"""Answers; whether the connection can be used again."""


def answer(body: object = None, status: int = 200, headers: Headers | None = None) -> Act:
    """A whole answer at once."""

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        data = body if isinstance(body, bytes) else orjson.dumps(completion(asked) if body is None else body)
        lines = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + data)
        await writer.drain()
        return True

    return act


def completion(asked: Asked, text: str = "fine", **more: Any) -> dict[str, Any]:
    """A chat completion without a stream."""
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": f"chatcmpl-{asked.headers.get('x-request-id')}", "choices": [choice], "usage": usage, **more}


def streamed(
    events: list[bytes] | Callable[[Asked], list[bytes]],
    *,
    until: int | None = None,
    then: str = "end",
    pause_s: float = 0.0,
    first_s: float = 0.0,
) -> Act:
    """Events as chunks; after `until` of them: "end" (all is well), "reset", "close" or "stall"."""

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(first_s)
        told = events(asked) if callable(events) else events
        for event in told[:until]:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(pause_s)
        if then == "end":
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        return await broken(then)(asked, writer)

    return act


def broken(how: str) -> Act:
    """ "reset" or "close" the connection, or "stall": fall silent."""

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        if how == "stall":
            await asyncio.Event().wait()
        if how == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        return False

    return act


def in_turn(*acts: Act) -> Act:
    """Each request another act; the last one goes on."""
    left = list(acts)

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        return await (left.pop(0) if len(left) > 1 else left[0])(asked, writer)

    return act


def by_stage(prefill: Act, decode: Act) -> Act:
    """A prefill hop is told by its `do_remote_decode`."""

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        params = asked.body.get("kv_transfer_params") or {}
        return await (prefill if params.get("do_remote_decode") else decode)(asked, writer)

    return act


def prefilled(params: dict[str, Any] | None = None, cached_tokens: int | None = None) -> Act:
    """A prefill engine's answer. `params`: its `kv_transfer_params`."""

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        said = completion(asked, "x", kv_transfer_params=params)
        if cached_tokens is not None:
            said["usage"]["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return await answer(said)(asked, writer)

    return act


def spoken(fields: dict[str, Any]) -> list[int]:
    """The prompt of a request whose prompt is token ids; else some ids."""
    params = fields.get("kv_transfer_params") or {}
    prompt = fields.get("prompt")
    return params.get("prompt_token_ids") or (prompt if isinstance(prompt, list) else [7, 7, 7])


def generates(ids: list[int], *, prompt: int = 3, **how: Any) -> Act:
    """Streams what is left of `ids` after the prompt's first `prompt` tokens, or answers it whole."""

    def left(asked: Asked) -> tuple[list[int], list[int]]:
        asked_ids = spoken(asked.body)
        return asked_ids, ids[len(asked_ids) - prompt :]

    def events(asked: Asked) -> list[bytes]:
        asked_ids, rest = left(asked)
        kind = Kind.CHAT if "chat" in asked.path else Kind.COMPLETION
        usage = bool((asked.body.get("stream_options") or {}).get("include_usage"))
        name = f"{kind}-{asked.headers['x-request-id']}"
        return stream(kind, asked_ids, rest, with_ids=bool(asked.body.get("return_token_ids")), name=name, usage=usage)

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        if asked.body.get("stream"):
            return await streamed(events, **how)(asked, writer)
        await asyncio.sleep(how.get("first_s", 0.0))
        if how.get("then", "end") != "end":
            return await broken(how["then"])(asked, writer)
        return await answer(completion(asked, "".join(pieces(left(asked)[1]))))(asked, writer)

    return act
