"""A live mock of a vLLM server: its API, its metrics, its latency and capacity, and on demand its failures.

For tests, benchmarks and trying out a router's configuration. One event loop's thread; several engines may share it.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from deepinfer_simulator import engine_pooling as pooling
from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_answers import Answer, ChatAnswer
from deepinfer_simulator.engine_completions import CompletionAnswer, GenerateAnswer
from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_control import control
from deepinfer_simulator.engine_faults import Faults
from deepinfer_simulator.engine_generation import Generation
from deepinfer_simulator.engine_http import Connection, Ended, Request
from deepinfer_simulator.engine_messages import MessagesAnswer
from deepinfer_simulator.engine_metrics import exposition
from deepinfer_simulator.engine_rank import Rank
from deepinfer_simulator.engine_requests import Job, Refused, chat_prompt, read
from deepinfer_simulator.engine_responses import ResponsesAnswer
from deepinfer_simulator.engine_transfer import Transfer

GENERATING: dict[str, tuple[str, Callable[[Job, str], Answer]]] = {
    "/v1/chat/completions": ("chat", ChatAnswer),
    "/v1/completions": ("completion", CompletionAnswer),
    "/v1/responses": ("responses", ResponsesAnswer),
    "/v1/messages": ("messages", MessagesAnswer),
    "/inference/v1/generate": ("generate", GenerateAnswer),
}
POOLING = {
    **dict.fromkeys(("/v1/embeddings",), pooling.embeddings),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), pooling.rerank),
    **dict.fromkeys(("/score", "/v1/score"), pooling.score),
}
KEPT_REQUESTS = 4096


class Received(NamedTuple):
    """What a test may ask about."""

    path: str
    headers: dict[str, str]
    body: bytes


class MockEngine:
    """`start`, then use `url`; `faults` and `counts` are there to be read and set."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.faults = Faults()
        self.counts: Counter[str] = Counter()
        """Requests; each path; stop, length, tool_calls; abort (the client left), broken (a fault), refused."""
        self.received: deque[Received] = deque(maxlen=KEPT_REQUESTS)
        self.host = "127.0.0.1"
        self.port = 0
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._numbers = itertools.count()
        self._fresh()

    @property
    def url(self) -> str:
        """http://host:port, the same after a restart."""
        return f"http://{self.host}:{self.port}"

    @property
    def running(self) -> int:
        """Generating requests here now, waiting ones too."""
        return sum(len(rank.running) + len(rank.waiting) for rank in self.ranks)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. Raises OSError."""
        self.host = host
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._answer, self._connections), host, port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a process that is killed: every connection is reset, all state is gone."""
        self.refuse()
        for connection in tuple(self._connections):
            connection.end(reset=True)
        self.transfer.close()
        while self._connections:
            await asyncio.sleep(0)

    async def restart(self, seconds: float = 0.0) -> None:
        """Stop, stay away so long, come back at the same address with an empty cache and a new identity."""
        await self.stop()
        self._fresh()
        await asyncio.sleep(seconds)
        await self.start(self.host, self.port)

    def refuse(self) -> None:
        """From now on, connections are refused; those that are open stay."""
        if self._server:
            self._server.close()
            self._server = None

    async def listen_again(self) -> None:
        """After `refuse`."""
        if self._server is None:
            await self.start(self.host, self.port)

    def _fresh(self) -> None:
        self.engine_id = uuid.uuid4().hex
        self.ranks = [Rank(self.config) for _ in range(self.config.ranks)]
        self.transfer = Transfer(self.config, self.engine_id, lambda: (self.host, self.port))
        self._next_rank = 0

    async def _answer(self, request: Request) -> None:
        path = request.path
        self.counts["requests"] += 1
        self.counts[path] += 1
        if path.startswith("/mock/"):
            await control(self, request)
        elif path == "/health":
            await request.answer(503 if "unhealthy" in self.faults else 200, b"")
        elif path == "/metrics":
            await request.answer(200, exposition(self.config, self.ranks, self.counts, self.transfer))
        elif path == "/load":
            await request.answer(200, {"server_load": self.running})
        elif path == "/version":
            await request.answer(200, {"version": "0.32.0"})
        elif path == "/query":
            ranks = range(len(self.ranks))
            await request.answer(200, {str(rank): {"engine_id": self.engine_id, "worker_addr": {}} for rank in ranks})
        else:
            await self._infer(request)

    async def _infer(self, request: Request) -> None:
        request.faults = self.faults.strike()
        self.received.append(Received(request.path, request.headers, bytes(request.body)))
        try:
            await request.before_head()
            if fault := request.faults.get("status"):
                wait = [] if fault.retry_after_s is None else [(b"retry-after", b"%d" % fault.retry_after_s)]
                self.counts["refused"] += 1
                await request.answer(
                    fault.status, self.error(request.path, fault.status, "a fault that was asked for"), wait
                )
            elif request.path in GENERATING:
                await self._generate(request)
            else:
                await self._rest(request)
        except Refused as refused:
            self.counts["refused"] += 1
            await request.answer(refused.status, self.error(request.path, refused.status, refused.message))
        except Ended:
            self.counts["broken"] += 1
            raise
        except asyncio.CancelledError:
            self.counts["abort"] += 1
            raise

    async def _generate(self, request: Request) -> None:
        api, form = GENERATING[request.path]
        job = read(api, self._body(request), self.config)
        rank = self._rank(request.headers.get("x-data-parallel-rank"))
        limit = self.config.max_waiting
        if limit is not None and len(rank.waiting) >= limit:
            raise Refused(503, f"The request queue is full ({limit} waiting).")
        name = f"{request.headers.get('x-request-id') or uuid.uuid4().hex}-{next(self._numbers)}"
        finish = await Generation(job, form(job, name), rank, self.transfer, self.config, name).run(request)
        self.counts[finish] += 1

    async def _rest(self, request: Request) -> None:
        path = request.path
        if path == "/v1/models":
            await request.answer(200, pooling.models(self.config))
        elif path in POOLING:
            body = self._body(request)
            await request.answer(200, POOLING[path](body, body.get("model") or self.config.models[0]))
        elif path == "/tokenize":
            await request.answer(200, pooling.tokenize(self._body(request), self.config))
        elif path == "/detokenize":
            await request.answer(200, {"prompt": tokens.decode(self._body(request).get("tokens") or ())})
        elif path == "/v1/messages/count_tokens":
            await request.answer(200, {"input_tokens": len(chat_prompt(self._body(request).get("messages") or []))})
        else:
            raise Refused(404, "Not Found")

    def _body(self, request: Request) -> Any:
        try:
            body = request.json()
        except ValueError:
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        return body

    def _rank(self, wanted: str | None) -> Rank:
        """The one asked for, else the next: vLLM's own balancing is not modelled. Raises Refused."""
        if wanted is None:
            self._next_rank += 1
            return self.ranks[self._next_rank % len(self.ranks)]
        if not wanted.isdigit() or int(wanted) >= len(self.ranks):
            raise Refused(400, f"data_parallel_rank {wanted} is out of range [0, {len(self.ranks)}).")
        return self.ranks[int(wanted)]

    def error(self, path: str, status: int, message: str) -> dict[str, Any]:
        """In the form of the API that is asked."""
        kind = "invalid_request_error" if status < 500 else "internal_server_error"
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": kind, "message": message}}
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}
