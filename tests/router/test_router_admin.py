"""The admin port: who may change what, and what strangers on the socket cannot do to it."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from select import select
from typing import Any

import pytest

from deepinfer_router.admin import Admin
from deepinfer_router.admin_http import MAX_CONNECTIONS, AdminAnswer, AdminRequest, AdminServer
from deepinfer_router.exposition import CONTENT_TYPE
from deepinfer_router.metrics import Registry

ENGINE = {"id": "a/b:1", "state": "ready", "ranks": [], "active": 0}
TOKEN = "a token of sixteen"


class Desk:
    """A supervisor that knows one engine."""

    draining = False
    started_at = 0.0
    unhealthy = ""

    def __init__(self) -> None:
        self.drained: list[tuple[str, bool]] = []
        self.registry = Registry()
        self.registry.counter("seen", "Seen.").labels().inc()
        self.reported: list[dict[str, Any]] = [
            {"worker": 0, "pid": 1, "ready": True, "silent_s": 0, "why_not_ready": "", "engines": [ENGINE]}
        ]

    def fresh_reports(self, patience_s: float) -> list[dict[str, Any]]:
        return self.reported

    def reports(self) -> list[dict[str, Any]]:
        return self.reported

    def metrics(self) -> list[dict[str, Any]]:
        return self.registry.snapshot()

    def autoscale(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        return {"prefill": {"desired": 3}}

    def drain_engine(self, engine: str, on: bool) -> None:
        self.drained.append((engine, on))

    def why_unhealthy(self) -> str:
        return self.unhealthy


@pytest.fixture
def desk() -> Desk:
    return Desk()


def ask(
    desk: Desk, path: str, method: str = "GET", *, token: str | None = None, peer: str = "127.0.0.1", **headers: str
) -> AdminAnswer:
    return Admin(desk, token)(AdminRequest(method, path, headers, b"", peer))


DRAIN = "/engines/a%2Fb%3A1/drain"


def test_draining_is_taken_from_this_host(desk: Desk) -> None:
    for peer in ("127.0.0.1", "127.8.8.8", "::1"):
        assert ask(desk, DRAIN, "POST", peer=peer).status == 200
    assert ask(desk, "/engines/a/b:1/undrain", "POST").status == 200
    assert desk.drained == [("a/b:1", True)] * 3 + [("a/b:1", False)]
    for peer in ("10.0.0.7", "fd00::1"):
        answer = ask(desk, DRAIN, "POST", peer=peer)
        assert (answer.status, answer.body) == (403, b"changes are taken from this host, or set admin.token\n")
    assert len(desk.drained) == 4


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://evil.example", "127.0.0.1:9401"),
        ("null", "127.0.0.1:9401"),
        ("https://127.0.0.1:9401.evil.example", "127.0.0.1:9401"),
        ("http://evil.example:9401", "evil.example:9401"),  # a name that was made to lead here
    ],
)
def test_pages_of_other_sites_change_nothing(desk: Desk, origin: str, host: str) -> None:
    answer = ask(desk, DRAIN, "POST", origin=origin, host=host)
    assert answer.status == 403 and desk.drained == []
    assert ask(desk, DRAIN, "POST", origin="http://127.0.0.1:9401", host="127.0.0.1:9401").status == 200


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer \xff"])
def test_with_a_token_only_it_counts(desk: Desk, shown: str) -> None:
    assert ask(desk, DRAIN, "POST", token=TOKEN, authorization=shown).status == 403
    assert ask(desk, DRAIN, "POST", token=TOKEN, peer="10.0.0.7", authorization=f"bearer {TOKEN}").status == 200
    assert desk.drained == [("a/b:1", True)]


def test_what_is_not_there(desk: Desk) -> None:
    assert ask(desk, "/nowhere").status == 404
    assert b"/metrics" in ask(desk, "/nowhere").body
    missing = ask(desk, "/engines/x:1/drain", "POST")
    assert (missing.status, missing.body) == (404, b"no engine 'x:1': there are a/b:1\n")
    assert ask(desk, "/engines/drain", "POST").status == 404
    assert ask(desk, DRAIN).status == 405
    assert ask(desk, "/metrics", "POST").status == 405
    assert desk.drained == []


def test_pages(desk: Desk) -> None:
    assert ask(desk, "/metrics").content_type == CONTENT_TYPE.decode()
    assert b"deepinfer_router_seen_total 1\n" in ask(desk, "/metrics").body
    assert json.loads(ask(desk, "/engines").body)[0]["id"] == "a/b:1"
    assert json.loads(ask(desk, "/autoscale").body) == {"prefill": {"desired": 3}}
    assert ask(desk, "/").content_type == "text/html; charset=utf-8"


def test_health_and_readiness(desk: Desk) -> None:
    assert ask(desk, "/health").status == 200
    assert ask(desk, "/ready")[::2] == (200, b"ready\n")
    desk.reported[0]["why_not_ready"] = "no engine is open for decode"
    assert ask(desk, "/ready")[::2] == (503, b"no engine is open for decode\n")
    desk.reported.append({**desk.reported[0], "why_not_ready": ""})  # one worker that can serve is enough
    assert ask(desk, "/ready").status == 200
    desk.draining = True
    assert ask(desk, "/ready")[::2] == (503, b"draining\n")
    desk.unhealthy = "no worker has answered for 61 s"
    assert ask(desk, "/health")[::2] == (503, b"no worker has answered for 61 s\n")


def test_an_error_of_ours_is_an_answer(desk: Desk) -> None:
    desk.reported = [{"worker": 0, "ready": True, "engines": [{}]}]
    assert ask(desk, "/status")[::2] == (500, b"KeyError: 'id'\n")


@pytest.fixture
def port(desk: Desk) -> Iterator[int]:
    server = AdminServer("127.0.0.1", 0, Admin(desk))
    server.start()
    yield server.port
    server.close()


def test_a_connection_serves_many_requests(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    for method, path, size in (
        ("GET", "/health", 3),
        ("HEAD", "/health", 0),
        ("POST", "/health", 7),
        ("GET", "/?x=1", 2),
    ):
        connection.request(method, path, body="x" * 100 if method == "POST" else None)
        response = connection.getresponse()
        assert len(response.read()) >= size
        assert response.headers["cache-control"] == "no-store"
    connection.close()


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /\xff HTTP/1.1\r\nA: \xff\r\n\r\n",
    ],
)
def test_nonsense_ends_its_connection_alone(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while more := client.recv(65536):
            answer += more
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    health(port)


def test_what_is_too_large_is_not_read(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client, pytest.raises(OSError):
        for _ in range(1000):
            client.sendall(b"GET / HTTP/1.1\r\nA: " + b"x" * 65536)
    health(port)


def test_a_crowd_keeps_no_probe_out(port: int) -> None:
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(MAX_CONNECTIONS)]
    for client in crowd[1:]:
        client.sendall(b"GET /health HT")
    probes = []
    for number in range(1, 6):
        probe = HTTPConnection("127.0.0.1", port, timeout=30)
        probe.request("GET", "/health")
        assert probe.getresponse().read() == b"ok\n"
        probes.append(probe)  # stays open
        closed = select(crowd, [], [], 30)[0]
        assert len(closed) == number
        for client in closed:
            with suppress(ConnectionResetError):  # where it was closed before it was read
                assert client.recv(1) == b""
    for probe in probes:
        probe.close()
    for client in crowd:
        client.close()
    health(port)


@pytest.mark.parametrize(
    "second", [b"GET /ready HTTP/1.1\r\n\r\n", b"POST /engines/a/drain HTTP/1.1\r\n\r\n", b"nonsense"]
)
def test_requests_are_not_read_as_one(port: int, second: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n" + second)
        assert client.recv(12) == b"HTTP/1.1 400"


def test_a_change_of_protocol_is_not_made(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        answer = b""
        while more := client.recv(65536):
            answer += more
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer


def health(port: int) -> None:
    """It still answers; a crowd may need a moment to be gone."""
    for _ in range(500):
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            return
        except OSError:
            continue
        finally:
            connection.close()
    raise AssertionError("it does not answer")
