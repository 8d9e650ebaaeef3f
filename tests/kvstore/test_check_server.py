"""A CHECK server among peers that are slow, broken, hostile or too many."""

import asyncio
import random
import socket
import ssl
import subprocess
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import pytest

from check_case import UNIT, daemon, eventually, namespace, store_prompt, storing
from deepinfer_kvstore.async_client import AsyncCheckClient
from deepinfer_kvstore.client import CheckClient, exchange
from deepinfer_kvstore.daemon import Address, Daemon
from deepinfer_kvstore.extra_keys import ExtraKeys, Lora, MultiModal
from deepinfer_kvstore.protocol import LENGTH, MAX_FRAME_BYTES, VERSION, CheckRequest, Message, pack, unpack
from deepinfer_kvstore.questions import Answer, Question
from deepinfer_kvstore.server import Limits
from deepinfer_kvstore.snapshot_wire import receive_exactly

NAME = namespace().directory
TOKENS = list(range(4 * UNIT))
HELLO = {"op": "hello", "version": VERSION}
CHECK = {"op": "check", "requests": [{"namespace": NAME, "tokens": b"\0" * 64 * UNIT}]}
TOKEN = "correct horse battery"


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Path]:
    with storing(tmp_path) as store:
        store_prompt(store, TOKENS)
        yield tmp_path


@contextmanager
def connection(path: Path, greet: bool = True) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.settimeout(20)
        opened.connect(str(path / "check.sock"))
        if greet:
            assert say(opened, HELLO) == {"version": VERSION}
        yield opened


def say(opened: socket.socket, message: Message) -> Message:
    return exchange(opened, pack(message), monotonic() + 20)


def hear(opened: socket.socket) -> Message:
    (size,) = LENGTH.unpack(receive_exactly(opened, LENGTH.size, monotonic() + 20))
    return unpack(receive_exactly(opened, size, monotonic() + 20))


def is_closed(opened: socket.socket) -> bool:
    try:
        return opened.recv(1) == b""
    except ConnectionError:
        return True


def assert_served(path: Path) -> None:
    asking = CheckClient(path / "check.sock", budget_seconds=20)
    assert asking.check(Question(NAME, TOKENS)).hit_tokens == 4 * UNIT
    asking.close()


def refused(running: Daemon, reason: str) -> float:
    value = running.metrics.registry.get_sample_value("deepinfer_kvstore_refused_total", {"reason": reason})
    return value or 0.0


def test_the_socket_is_the_users_alone(stored: Path) -> None:
    with daemon(stored):
        assert (stored / "check.sock").stat().st_mode & 0o777 == 0o600
    assert not (stored / "check.sock").exists()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        LENGTH.pack(1 << 11),
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        pack({"op": "hello"}),
        pack({"op": "hello", "version": VERSION + 1}),
        pack({"op": "check", "requests": []}),
    ],
)
def test_who_does_not_begin_as_agreed_is_sent_away(stored: Path, sent: bytes) -> None:
    with daemon(stored), connection(stored, greet=False) as opened:
        opened.sendall(sent)
        opened.shutdown(socket.SHUT_WR)
        received = b""
        while piece := opened.recv(4096):
            received += piece
        assert b"hit_tokens" not in received
        assert_served(stored)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({}, "malformed"),
        ({"op": "no such"}, "malformed"),
        ({"op": ["check"]}, "malformed"),
        ({"op": "check"}, "malformed"),
        ({"op": "check", "requests": {}}, "malformed"),
        ({"op": "check", "requests": [{}] * 257}, "malformed"),
        ({"op": "redeem"}, "malformed"),
        ({"op": "redeem", "ticket": b"x"}, "malformed"),
        ({"op": "redeem", "ticket": b"x" * 16}, "ticket"),
        ({"op": "release", "ticket": 5}, "malformed"),
    ],
)
def test_a_request_that_is_none_is_answered_so_and_the_next_one_served(
    stored: Path, message: Message, code: str
) -> None:
    with daemon(stored), connection(stored) as opened:
        assert say(opened, message)["error"] == code
        assert say(opened, CHECK)["replies"][0]["hit_tokens"] == 0


def test_one_bad_request_of_a_batch_spoils_no_other(stored: Path) -> None:
    with daemon(stored), connection(stored) as opened:
        good = CHECK["requests"]
        replies = say(opened, {"op": "check", "requests": [{"bad": 1}, *good, 7]})["replies"]
        assert [reply.get("error") for reply in replies] == ["malformed", None, "malformed"]


def test_tokens_go_on_from_a_chain_that_is_kept(tmp_path: Path) -> None:
    """A client that does not hash, say in another language."""
    tokens = list(range(10 * UNIT + 5))
    picture = MultiModal("cat", 3 * UNIT + 4, 2 * UNIT)
    extra = ExtraKeys("salt", Lora("l", "/l"), (picture,))

    def question(start: int, end: int, **more: Any) -> Message:
        ids = array("I", tokens[start:end]).tobytes()
        request = CheckRequest(NAME, tokens=ids, keep=True, extra=extra, **more).message()
        return {"op": "check", "requests": [request]}

    with storing(tmp_path) as store, daemon(tmp_path), connection(tmp_path) as opened:
        store_prompt(store, tokens, extra)
        first = say(opened, question(0, 4 * UNIT + 3))["replies"][0]
        assert first["hit_tokens"] == 4 * UNIT and len(first["tail"]) == 32
        second = say(opened, question(4 * UNIT, 10 * UNIT + 5, after=first["tail"]))["replies"][0]
        assert second["hit_tokens"] == 10 * UNIT
        gone = say(opened, question(4 * UNIT, 10 * UNIT, after=first["tail"]))["replies"][0]
        assert gone["error"] == "resend"


@pytest.mark.parametrize("seed", range(4))
def test_noise_stops_nobody(stored: Path, seed: int) -> None:
    rng = random.Random(seed)
    good = pack(CHECK)
    with daemon(stored):
        for greet in (True, False):
            with connection(stored, greet) as opened:
                for _ in range(20):
                    at = rng.randrange(len(good))
                    noise = rng.choice(
                        [rng.randbytes(rng.randrange(1, 300)), good[:at] + rng.randbytes(3) + good[at + 3 :]]
                    )
                    try:
                        opened.sendall(noise)
                    except OSError:
                        break
        assert_served(stored)


def test_a_frame_beyond_all_bounds_ends_the_connection(stored: Path) -> None:
    with daemon(stored) as running, connection(stored) as opened:
        opened.sendall(LENGTH.pack(MAX_FRAME_BYTES + 1))
        assert hear(opened)["error"] == "malformed"
        assert is_closed(opened)
        assert refused(running, "malformed") == 1
        assert_served(stored)


def test_slow_peers_lose_their_connections_and_nobody_else_waits(stored: Path) -> None:
    limits = Limits(frame_seconds=0.3, idle_seconds=1.0)
    with daemon(stored, limits=limits) as running:
        with connection(stored, greet=False) as silent, connection(stored) as drip, connection(stored) as idle:
            drip.sendall(LENGTH.pack(1000) + b"a few bytes")
            assert_served(stored)
            assert is_closed(silent) and is_closed(drip) and is_closed(idle)
        assert refused(running, "slow") >= 1
        assert_served(stored)


def test_a_peer_that_takes_no_answers_is_let_go(stored: Path) -> None:
    limits = Limits(frame_seconds=0.3, checks_per_second=1e9)
    with daemon(stored, limits=limits) as running, connection(stored) as opened:
        opened.settimeout(5)
        frame = pack({**CHECK, "requests": CHECK["requests"] * 256})

        def fill() -> bool:
            with suppress(OSError):  # full buffers, or closed at last
                opened.sendall(frame)
            return refused(running, "slow") > 0

        eventually(fill)
        assert_served(stored)


def test_bytes_on_their_way_are_bounded(stored: Path) -> None:
    with daemon(stored, limits=Limits(inflight_bytes=1 << 20)), connection(stored) as first:
        first.sendall(LENGTH.pack(900_000) + b"x")
        with connection(stored) as second:
            second.sendall(LENGTH.pack(900_000) + b"x")
            assert hear(second)["error"] == "busy"
        assert_served(stored)


def test_connections_are_bounded(stored: Path) -> None:
    with daemon(stored, limits=Limits(connections=2)) as running:
        with connection(stored), connection(stored):
            with connection(stored, greet=False) as third:
                assert is_closed(third)
            assert refused(running, "connections") == 1
        eventually(lambda: running.metrics.registry.get_sample_value("deepinfer_kvstore_connections") == 0)
        assert_served(stored)


@pytest.mark.parametrize("over_tls", [False, True])
def test_strangers_leave_room_for_the_nodes_own(stored: Path, certificate: tuple[Path, Path], over_tls: bool) -> None:
    address = Address("127.0.0.1", 0, TOKEN, tls_of(certificate) if over_tls else None)
    limits = Limits(connections=2, frame_seconds=30)
    with daemon(stored, listen=address, limits=limits) as running, ExitStack() as stack:
        for _ in range(3):  # who says nothing, not even a greeting of TLS
            stack.enter_context(socket.create_connection(("127.0.0.1", running.tcp_port), 20))
        eventually(lambda: refused(running, "connections") == 1)
        assert_served(stored)


def test_each_peer_has_its_rate(stored: Path) -> None:
    with daemon(stored, limits=Limits(checks_per_second=10)) as running, connection(stored) as opened:
        assert say(opened, {**CHECK, "requests": CHECK["requests"] * 11})["error"] == "limited"
        assert len(say(opened, {**CHECK, "requests": CHECK["requests"] * 10})["replies"]) == 10
        assert refused(running, "limited") == 1
        asking = CheckClient(stored / "check.sock", budget_seconds=20)
        answers = asking.check_many([Question(NAME, TOKENS)] * 11)
        assert {answer.reason for answer in answers} == {"limited"}
        assert asking.failures == {"limited": 11}
        asking.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def tls_of(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    return tls


def ask_tcp(running: Daemon, **changes: Any) -> Answer:
    asking = CheckClient(("localhost", running.tcp_port), budget_seconds=20, **changes)
    answer = asking.check(Question(NAME, TOKENS))
    asking.close()
    return answer


def test_tcp_wants_the_token(stored: Path) -> None:
    with daemon(stored, listen=Address("127.0.0.1", 0, TOKEN, None)) as running:
        assert ask_tcp(running, token=TOKEN).hit_tokens == 4 * UNIT
        for wrong in ("", "wrong", TOKEN[:-1], "ü" + TOKEN):
            assert ask_tcp(running, token=wrong) == Answer(reason="token")
        assert refused(running, "token") >= 4
        assert_served(stored)  # the socket does not


def test_large_frames_over_tls(stored: Path, certificate: tuple[Path, Path]) -> None:
    """Larger than what is read ahead: reading is held up and goes on."""
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with daemon(stored, listen=Address("127.0.0.1", 0, TOKEN, tls_of(certificate))) as running:
        asking = CheckClient(("localhost", running.tcp_port), token=TOKEN, tls=trusting, budget_seconds=60)
        for _ in range(3):
            assert asking.check(Question(NAME, [*TOKENS, *range(2 << 20)][: 2 << 20])).hit_tokens == 4 * UNIT
        assert not asking.failures
        asking.close()


def test_tcp_with_tls(stored: Path, certificate: tuple[Path, Path]) -> None:
    tls = tls_of(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with daemon(stored, listen=Address("127.0.0.1", 0, TOKEN, tls), limits=Limits(frame_seconds=1)) as running:
        assert ask_tcp(running, token=TOKEN, tls=trusting).hit_tokens == 4 * UNIT
        assert ask_tcp(running, token=TOKEN, tls=ssl.create_default_context()) == Answer(reason="unreachable")
        assert ask_tcp(running, token=TOKEN).reason in ("unreachable", "timeout")


@pytest.mark.parametrize(
    "reply", [b"", b"\0\0\0\x01\xc1", b"\xff\xff\xff\xff", pack({}), pack({"replies": 1}), b"HTTP/1.1 400\r\n"]
)
def test_a_server_that_is_none_costs_an_answer_and_no_error(tmp_path: Path, reply: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "check.sock"))
        listening.listen()

        def answer_once() -> None:
            for number in range(2):
                peer, _ = listening.accept()
                with peer:
                    peer.recv(1000)
                    peer.sendall(pack({"version": VERSION}) if number else reply)
                    if number:
                        peer.recv(1000)
                        peer.sendall(reply)

        thread = Thread(target=answer_once, daemon=True)
        thread.start()
        asking = CheckClient(tmp_path / "check.sock", budget_seconds=5)
        for _ in range(2):
            answer = asking.check(Question(NAME, TOKENS))
            assert answer.hit_tokens == 0 and answer.reason
        thread.join(20)
        asking.close()


def test_no_server_is_soon_found_out_and_then_not_asked_at_every_turn(tmp_path: Path) -> None:
    """# vllm hf3fs connector: synchronous HTTP with retries on the scheduler thread."""
    asking = CheckClient(tmp_path / "check.sock")
    answers = [asking.check(Question(NAME, TOKENS)) for _ in range(50)]
    assert {answer.hit_tokens for answer in answers} == {0}
    assert {answer.reason for answer in answers} <= {"unreachable", "timeout"}
    assert sum(asking.failures.values()) == 50
    asking.close()


def test_a_server_that_never_answers_costs_the_budget(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "check.sock"))
        listening.listen()
        asking = CheckClient(tmp_path / "check.sock", budget_seconds=0.05)
        assert asking.check(Question(NAME, TOKENS)) == Answer(reason="timeout")
        asking.close()


def test_a_client_finds_a_server_that_was_started_anew(stored: Path) -> None:
    asking = CheckClient(stored / "check.sock", budget_seconds=20)
    for _ in range(3):
        with daemon(stored):
            assert asking.check(Question(NAME, TOKENS)).hit_tokens == 4 * UNIT
    assert asking.check(Question(NAME, TOKENS)).hit_tokens == 0
    with daemon(stored):
        eventually(lambda: asking.check(Question(NAME, TOKENS)).hit_tokens == 4 * UNIT)
    asking.close()


def test_an_event_loop_survives_servers_that_come_go_and_hang(stored: Path) -> None:
    question = Question(NAME, TOKENS)

    async def ask_while_it_runs(asking: AsyncCheckClient) -> Answer:
        with daemon(stored):
            answers = await asyncio.gather(*(asking.check(question) for _ in range(20)))
        assert len(set(answers)) == 1
        return answers[0]

    async def scenario() -> None:
        asking = AsyncCheckClient(stored / "check.sock", budget_seconds=20)
        for _ in range(3):
            assert (await ask_while_it_runs(asking)).hit_tokens == 4 * UNIT
        assert (await asking.check(question)).reason == "unreachable"
        assert sum(asking.failures.values()) == 1
        await asking.close()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(stored / "check.sock"))
            listening.listen()
            hasty = AsyncCheckClient(stored / "check.sock", budget_seconds=0.05, connections=2)
            answers = await asyncio.gather(*(hasty.check(question) for _ in range(5)))
            assert set(answers) == {Answer(reason="timeout")}
            await hasty.close()

    asyncio.run(scenario(), debug=True)
