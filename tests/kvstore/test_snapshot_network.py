"""Snapshots between nodes, over real sockets: the announced bytes or none, in bounded time, whatever a peer does."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.snapshot_directory import Holder, SnapshotDirectory
from deepinfer_kvstore.snapshot_peers import SnapshotPeers
from deepinfer_kvstore.snapshot_server import MAX_KEYS, SnapshotServer
from deepinfer_kvstore.snapshot_wire import MAX_FRAME_BYTES, receive, send
from deepinfer_kvstore.snapshots import SnapshotRing, digest_of, snapshot_key

TOKEN = "a token"
PAYLOAD = bytes(range(256)) * 1000
KEY = snapshot_key(bytes(32), 7, bytes(32))
OTHER = snapshot_key(bytes(32), 7, b"x" * 32)
PATIENCE_SECONDS = 0.4


@pytest.fixture
def ring() -> SnapshotRing:
    ring = SnapshotRing(10 << 20)
    assert ring.put(KEY, PAYLOAD, b"s")
    return ring


@pytest.fixture
def server(ring: SnapshotRing) -> Iterator[SnapshotServer]:
    server = SnapshotServer(("127.0.0.1", 0), TOKEN, ring=ring, directory=SnapshotDirectory(), insecure=True)
    yield server
    server.close()


@pytest.fixture
def peers() -> SnapshotPeers:
    return SnapshotPeers(TOKEN, timeout_seconds=30)


def holder_at(port: int, payload: bytes = PAYLOAD, key: bytes = KEY) -> Holder:
    return Holder(f"127.0.0.1:{port}", len(payload), digest_of(key, payload), 60.0)


@contextmanager
def peer_that(behaves: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a node that treats each connection as it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def loop() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    behaves(connection)

    thread = Thread(target=loop, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    listener.close()


def test_fetch_brings_what_was_put(server: SnapshotServer, peers: SnapshotPeers) -> None:
    assert peers.fetch(KEY, holder_at(server.port), len(PAYLOAD)) == PAYLOAD
    assert peers.counts() == {"fetched": 1}


def test_holder_that_lost_it(server: SnapshotServer, peers: SnapshotPeers) -> None:
    assert peers.fetch(OTHER, holder_at(server.port, key=OTHER), len(PAYLOAD)) is None
    assert peers.counts() == {"absent": 1}


def test_directory_over_the_network(server: SnapshotServer, peers: SnapshotPeers) -> None:
    directory = f"127.0.0.1:{server.port}"
    assert peers.locate(directory, [OTHER, KEY]) is None
    holder = holder_at(server.port)
    assert peers.announce(directory, KEY, holder)
    found = peers.locate(directory, [OTHER, KEY])
    assert found is not None and found[0] == 1 and found[1][:3] == holder[:3] and 59 < found[1].seconds <= 60
    assert peers.withdraw(directory, KEY, holder.address)
    assert peers.locate(directory, [OTHER, KEY]) is None
    assert not peers.counts()


def test_expired_at_its_holder(peers: SnapshotPeers) -> None:
    now = [0.0]
    ring = SnapshotRing(10 << 20, expiry_seconds=60, clock=lambda: now[0])
    ring.put(KEY, PAYLOAD, b"s")
    server = SnapshotServer(("127.0.0.1", 0), TOKEN, ring=ring, insecure=True)
    now[0] = 60.0
    assert peers.fetch(KEY, holder_at(server.port), len(PAYLOAD)) is None
    assert peers.counts() == {"absent": 1}
    server.close()


def test_dead_peer_and_dead_directory(peers: SnapshotPeers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert peers.fetch(KEY, holder_at(port), len(PAYLOAD)) is None
    assert peers.locate(f"127.0.0.1:{port}", [KEY]) is None
    assert not peers.announce(f"127.0.0.1:{port}", KEY, holder_at(port))
    assert peers.fetch(KEY, holder_at(port)._replace(address="no address"), len(PAYLOAD)) is None
    assert peers.counts() == {"unreachable": 2, "directory_failed": 2}


def answer(payload: bytes, length: int | None = None) -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        receive(connection, monotonic() + 5)
        send(connection, {"length": len(payload) if length is None else length}, monotonic() + 5, payload)

    return behave


def drip(connection: socket.socket) -> None:
    receive(connection, monotonic() + 5)
    send(connection, {"length": len(PAYLOAD)}, monotonic() + 5)
    while True:
        connection.send(b"\0")
        sleep(0.02)


def hold(connection: socket.socket) -> None:
    connection.settimeout(5)
    while connection.recv(1 << 16):
        pass


def raw(reply: bytes) -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        receive(connection, monotonic() + 5)
        connection.sendall(reply)

    return behave


FLIPPED = bytes([PAYLOAD[0] ^ 1]) + PAYLOAD[1:]


@pytest.mark.parametrize(
    ("behaves", "how"),
    [
        pytest.param(answer(FLIPPED), "corrupt", id="one wrong bit"),
        pytest.param(answer(bytes(len(PAYLOAD))), "corrupt", id="zeros"),
        pytest.param(answer(PAYLOAD + b"\0"), "wrong_length", id="longer"),
        pytest.param(answer(PAYLOAD, 1 << 60), "wrong_length", id="exabyte"),
        pytest.param(answer(PAYLOAD[:-1], len(PAYLOAD)), "unreachable", id="cut short"),
        pytest.param(drip, "unreachable", id="a byte now and then"),
        pytest.param(hold, "unreachable", id="silent"),
        pytest.param(lambda connection: None, "unreachable", id="hangs up"),
        pytest.param(raw(b"\xff\xff\xff\xff"), "unreachable", id="frame of 4 GiB"),
        pytest.param(raw(b"\0\0\0\1\xc1"), "unreachable", id="no msgpack"),
        pytest.param(raw(b"\0\0\0\1\x01"), "unreachable", id="no map"),
        pytest.param(raw(b"HTTP/1.1 400 Bad Request\r\n"), "unreachable", id="another protocol"),
    ],
)
def test_lying_and_stalling_peers(behaves: Callable[[socket.socket], None], how: str) -> None:
    stalls = behaves in (drip, hold)
    peers = SnapshotPeers(TOKEN, timeout_seconds=PATIENCE_SECONDS if stalls else 30)
    with peer_that(behaves) as port:
        assert peers.fetch(KEY, holder_at(port), len(PAYLOAD)) is None
        assert peers.locate(f"127.0.0.1:{port}", [KEY]) is None
    assert peers.counts()[how] == 1


def test_another_snapshot_of_the_same_length_is_refused(peers: SnapshotPeers) -> None:
    """The right bytes of another key: what a directory that mixes keys up would bring."""
    with peer_that(answer(PAYLOAD)) as port:
        assert peers.fetch(OTHER, holder_at(port, key=KEY), len(PAYLOAD)) is None
    assert peers.counts() == {"corrupt": 1}


def test_forger_without_the_secret_is_refused(server: SnapshotServer) -> None:
    peers = SnapshotPeers(TOKEN, secret=b"s" * 32, timeout_seconds=5)
    assert peers.fetch(KEY, holder_at(server.port), len(PAYLOAD)) is None
    true = holder_at(server.port)._replace(digest=digest_of(KEY, PAYLOAD, b"s" * 32))
    assert peers.fetch(KEY, true, len(PAYLOAD)) == PAYLOAD


@pytest.mark.parametrize(
    "reply",
    [
        {"position": 1, "holder": ["a:1", 1, bytes(16), 1.0]},
        {"position": -1, "holder": ["a:1", 1, bytes(16), 1.0]},
        {"position": 0, "holder": ["a:1", -1, bytes(16), 1.0]},
        {"position": 0, "holder": ["a:1", 1, bytes(15), 1.0]},
        {"position": 0, "holder": ["a" * 300, 1, bytes(16), 1.0]},
        {"position": 0, "holder": ["a:1", 1, bytes(16), float("nan")]},
        {"position": 0, "holder": None},
        {"position": "0"},
        {},
    ],
)
def test_lying_directory(peers: SnapshotPeers, reply: dict[str, object]) -> None:
    body = msgpack.packb(reply)
    with peer_that(raw(len(body).to_bytes(4, "big") + body)) as port:
        assert peers.locate(f"127.0.0.1:{port}", [KEY]) is None


def test_wrong_token_is_told_nothing(server: SnapshotServer) -> None:
    stranger = SnapshotPeers("another token", timeout_seconds=5)
    assert stranger.fetch(KEY, holder_at(server.port), len(PAYLOAD)) is None
    assert not stranger.announce(f"127.0.0.1:{server.port}", KEY, holder_at(server.port))
    assert stranger.counts() == {"unreachable": 1, "directory_failed": 1}


def ask(port: int, body: bytes) -> bytes:
    """What the server says to these bytes before it hangs up."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.settimeout(10)
        said = b""
        try:
            connection.sendall(body)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                said += piece
        except OSError as error:
            assert not isinstance(error, TimeoutError)
        return said


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=200), framed=st.booleans())
def test_server_survives_any_bytes(server: SnapshotServer, peers: SnapshotPeers, body: bytes, framed: bool) -> None:
    assert ask(server.port, (len(body).to_bytes(4, "big") if framed else b"") + body) == b""
    assert peers.fetch(KEY, holder_at(server.port), len(PAYLOAD)) == PAYLOAD


@pytest.mark.parametrize(
    "request_fields",
    [
        {},
        {"op": "exec"},
        {"op": ["get"]},
        {"op": "get", "key": "text"},
        {"op": "get", "key": KEY[:-1]},
        {"op": "locate", "keys": [KEY] * (MAX_KEYS + 1)},
        {"op": "locate", "keys": KEY},
        {"op": "announce", "key": KEY, "holder": ["a:1", 1, b"", 1.0]},
        {"op": "announce", "key": KEY, "holder": ["a:1", True, bytes(16), 1e12]},
        {"op": "withdraw", "key": KEY, "address": 1},
    ],
)
def test_wrong_requests_get_no_answer(
    server: SnapshotServer, peers: SnapshotPeers, request_fields: dict[str, object]
) -> None:
    body = msgpack.packb({"token": TOKEN, **request_fields})
    assert len(body) < MAX_FRAME_BYTES
    assert ask(server.port, len(body).to_bytes(4, "big") + body) == b""
    assert peers.fetch(KEY, holder_at(server.port), len(PAYLOAD)) == PAYLOAD


def test_a_thousand_keys_fit_a_question(server: SnapshotServer) -> None:
    peers, directory = SnapshotPeers(TOKEN, timeout_seconds=10), f"127.0.0.1:{server.port}"
    keys = [snapshot_key(bytes(32), 7, n.to_bytes(32, "big")) for n in range(MAX_KEYS)]
    assert peers.announce(directory, keys[-1], holder_at(server.port))
    found = peers.locate(directory, keys)
    assert found is not None and found[0] == MAX_KEYS - 1


def test_idle_connections_do_not_keep_others_out_for_long(ring: SnapshotRing, peers: SnapshotPeers) -> None:
    server = SnapshotServer(
        ("127.0.0.1", 0), TOKEN, ring=ring, insecure=True, connections=2, timeout_seconds=PATIENCE_SECONDS
    )
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    ended = [connection.recv(1) for connection in idle]
    assert ended == [b""] * 4
    deadline = monotonic() + 10
    while peers.fetch(KEY, holder_at(server.port), len(PAYLOAD)) is None:
        assert monotonic() < deadline
    for connection in idle:
        connection.close()
    server.close()


def test_closed_server_lets_its_port_go(ring: SnapshotRing, peers: SnapshotPeers) -> None:
    server = SnapshotServer(("127.0.0.1", 0), TOKEN, ring=ring, insecure=True)
    server.close()
    server.close()
    assert peers.fetch(KEY, holder_at(server.port), len(PAYLOAD)) is None
    SnapshotServer(("127.0.0.1", server.port), TOKEN, ring=ring, insecure=True).close()


def test_open_doors_are_refused(ring: SnapshotRing, server: SnapshotServer) -> None:
    with pytest.raises(StoreConfigError, match="without a token"):
        SnapshotServer(("127.0.0.1", 0), "", ring=ring, insecure=True)
    with pytest.raises(StoreConfigError, match="without TLS"):
        SnapshotServer(("127.0.0.1", 0), TOKEN, ring=ring)
    with pytest.raises(StoreConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        SnapshotServer(("127.0.0.1", server.port), TOKEN, ring=ring, insecure=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl's command")
def test_tls(ring: SnapshotRing, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate, key)
    server = SnapshotServer(("127.0.0.1", 0), TOKEN, ring=ring, tls=ours)
    trusting = ssl.create_default_context(cafile=str(certificate))
    fetched = SnapshotPeers(TOKEN, tls=trusting, timeout_seconds=10).fetch(KEY, holder_at(server.port), len(PAYLOAD))
    assert fetched == PAYLOAD
    for stranger in (
        SnapshotPeers(TOKEN, tls=ssl.create_default_context(), timeout_seconds=5),
        SnapshotPeers(TOKEN, timeout_seconds=5),
    ):
        assert stranger.fetch(KEY, holder_at(server.port), len(PAYLOAD)) is None
    server.close()
