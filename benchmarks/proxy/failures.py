"""What happens to requests when engines fail, clients leave, and prompts are large: counted on mock engines."""

from __future__ import annotations

import http.client
import json
import random
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from proxy.contenders import Running
from proxy.tools import OTHER_CORE, Process, request

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
MOST_SECONDS = 60.0
"""Longer than any of this takes: then something hangs, and that is the result."""
_POLLING = 2
"""Connections to an engine at a time that no request needs: a poll's and a probe's."""
_SETTLES_S = 20.0


class Engine:
    """A mock engine in another process, over its control endpoint."""

    def __init__(self, url: str) -> None:
        self.url = url

    def fail(self, kind: str, **how: Any) -> None:
        """From now on."""
        self._ask("POST", "/mock/faults", {"kind": kind, **how})

    def heal(self) -> None:
        """No faults."""
        self._ask("DELETE", "/mock/faults")

    def state(self) -> Any:
        """counts, running, leases."""
        return self._ask("GET", "/mock/state")

    def asked(self) -> int:
        """Inference requests so far."""
        counts = self.state()["counts"]
        return sum(counts.get(path, 0) for path in ("/v1/chat/completions", "/inference/v1/generate"))

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, method=method), timeout=30) as answer:
            return json.loads(answer.read())


@contextmanager
def mock_engines(scratch: Path, *settings: str, count: int = 2) -> Iterator[list[Engine]]:
    """`deepinfer mock-engine`."""
    command = [sys.executable, "-u", "-m", "deepinfer_vllm.cli.main", "mock-engine", "--engines", str(count), *settings]
    process = Process(command, OTHER_CORE, scratch / "engines.log")
    try:
        yield [Engine(process.line()) for _ in range(count)]
    finally:
        process.stop()


def post(port: int, body: Any) -> tuple[int, bytes]:
    """Status and body; 0 where the connection broke."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MOST_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def hits_per_request(port: int, engines: list[Engine], kind: str, count: int, **how: Any) -> dict[str, float]:
    """With every engine failing so (or, with `first_only`, one): what clients saw, and how often engines were asked."""
    first_only = how.pop("first_only", False)
    for engine in engines[: 1 if first_only else None]:
        engine.fail(kind, **how)
    before = sum(engine.asked() for engine in engines)
    with ThreadPoolExecutor(8) as pool:
        statuses = [status for status, _ in pool.map(lambda _: post(port, CHAT), range(count))]
    asked = sum(engine.asked() for engine in engines) - before
    for engine in engines:
        engine.heal()
    return {"requests": count, "served": statuses.count(200), "hits_per_request": asked / count}


def cancel_ms(port: int, body: Any, phase: Callable[[], bool], over: Callable[[], bool], rounds: int) -> list[float]:
    """Milliseconds from a client's leaving, once `phase()` holds, until `over()` does."""
    found = []
    for _ in range(rounds):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request(body))
            _until(phase)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        left = time.perf_counter()
        _until(over)
        found.append((time.perf_counter() - left) * 1e3)
    return found


def cancel_between_ms(port: int, prefill: Engine, decode: Engine, body: Any, rounds: int) -> list[float]:
    """`cancel_ms` of clients whose prompt is computed and whose decode waits for its place, until the prefill engine
    has its blocks back and the decode engine knows no more of them. It is kept busy, and does one request at a time."""
    with socket.create_connection(("127.0.0.1", int(decode.url.rpartition(":")[2]))) as busy:
        busy.sendall(request({**body, "stream": True}))
        _until(lambda: decode.state()["running"] == 1)
        return cancel_ms(
            port,
            body,
            lambda: prefill.state()["leases"]["held"] == 1 and decode.state()["running"] == 2,
            lambda: prefill.state()["leases"]["held"] == 0 and decode.state()["running"] == 1,
            rounds,
        )


def stalled_seconds(port: int, engines: list[Engine]) -> tuple[float, bool]:
    """Seconds until the client of a stream that stalls is told, and whether it is told by more than an end."""
    for engine in engines:
        engine.fail("stall_mid", after_events=3)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=MOST_SECONDS) as client:
            client.sendall(request({**CHAT, "stream": True}))
            data, last = b"", time.perf_counter()
            while piece := client.recv(65536):
                data += piece
                last = time.perf_counter() if b"error" not in data else last
                if b"error" in data or b"[DONE]" in data:
                    break
            return time.perf_counter() - last, b'"error"' in data and b"[DONE]" not in data
    except TimeoutError:
        return MOST_SECONDS, False
    finally:
        for engine in engines:
            engine.heal()


def aborts(running: Running, engines: list[Engine], count: int) -> dict[str, float]:
    """Clients that leave at random moments; what is left of them in engines and proxy.

    Descriptors are told apart: connections to engines come and go with polls and probes, one of each at a time to each
    engine, and what requests had opened beyond that is closed once it is not used (`http.timeouts.idle_s`).
    """
    ports = {int(engine.url.rpartition(":")[2]) for engine in engines}
    _leave(running.port, range(count, count + count // 4))  # what is allocated once is there then
    post(running.port, CHAT)
    _until(lambda: running.process.open_files(ports)[1] <= _POLLING * len(engines))
    files, _ = running.process.open_files(ports)
    rss = running.process.rss_mb()
    _leave(running.port, range(count))
    _until(lambda: not any(engine.state()["running"] for engine in engines))
    began = time.monotonic()
    most = others = connections = 0
    while (spent := time.monotonic() - began) < _SETTLES_S:
        others, connections = running.process.open_files(ports)
        most = max(most, connections)
        if others <= files and connections <= _POLLING * len(engines):
            break
        time.sleep(0.1)
    return {
        "aborts": count,
        "running": sum(engine.state()["running"] for engine in engines),
        "more_files": others - files,
        "engine_connections_at_the_end": most,
        "engine_connections_left": max(0, connections - _POLLING * len(engines)),
        "settled_s": spent,
        "more_rss_mb": running.process.rss_mb() - rss,
        "served_after": post(running.port, CHAT)[0],
    }


def _leave(port: int, numbers: range) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: _abort(port, number), numbers))


def _abort(port: int, number: int) -> None:
    rng = random.Random(number)
    body = request({**CHAT, "max_tokens": 200, "stream": rng.random() < 0.7})
    with socket.create_connection(("127.0.0.1", port), timeout=MOST_SECONDS) as client:
        client.sendall(body[: rng.randrange(1, len(body))] if rng.random() < 0.2 else body)
        client.settimeout(rng.random() * 0.05 + 1e-4)
        with suppress(OSError):
            client.recv(rng.randrange(1, 4096))
        if rng.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("what had to happen did not, within a minute")
        time.sleep(0.001)
