"""TLS on both sides, certificates of clients, and sockets without Nagle's delay."""

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
import uvloop
from router_http_case import WAIT_S, Answer, Engine, chunked, read_answer, request

from deepinfer_router.errors import RouterConfigError
from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import Upstream, UpstreamError
from deepinfer_router.http_config import EngineTls, ServerTls, Timeouts
from deepinfer_router.http_server import HttpServer
from deepinfer_router.relay import relay

EVENTS = [b"data: %b\n\n" % (b"x" * 50_000)] * 20


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority `ca`, and certificates `server` (localhost), `client` and `stranger` (of no authority)."""
    directory = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for name in ("ca", "stranger"):
        openssl("req", "-x509", *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return directory


async def through(certificates: Path, engine_tls: EngineTls, client: ssl.SSLContext, url: str = "localhost") -> Answer:
    """A stream of a megabyte through TLS twice; the engine asks for a certificate as well."""
    server_tls = ServerTls(
        certificate=certificates / "server.pem", key=certificates / "server.key", client_ca=certificates / "ca.pem"
    )
    engine = Engine()
    engine.script = chunked(*EVENTS)
    await engine.start(ssl=server_tls.context())
    upstream = Upstream(f"https://{url}:{engine.port}", Timeouts(connect_s=WAIT_S), engine_tls)
    failures: list[UpstreamError] = []

    async def handler(exchange: Exchange) -> None:
        try:
            response = await upstream.send(b"POST", b"/", [], exchange.body)
            await relay(response, exchange)
        except UpstreamError as error:
            failures.append(error)
            exchange.respond(502, [], error.message.encode())

    server = HttpServer(handler, tls=server_tls.context())
    port = await server.listen("127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
        for _ in range(2):
            writer.write(request(b"POST", b"/", b"x" * 300_000))
            answer = await asyncio.wait_for(read_answer(reader), WAIT_S)
        writer.close()
        return answer
    finally:
        await server.drain(0)
        await upstream.close()
        await engine.stop()


def run(*arguments: object, **named: object) -> Answer:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(through(*arguments, **named))  # type: ignore[arg-type]


def client_context(certificates: Path, shows: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    if shows:
        context.load_cert_chain(certificates / f"{shows}.pem", certificates / f"{shows}.key")
    return context


def test_tls_on_both_sides(certificates: Path) -> None:
    shown = {"certificate": certificates / "client.pem", "key": certificates / "client.key"}
    client = client_context(certificates, "client")
    assert run(certificates, EngineTls(ca=certificates / "ca.pem", **shown), client).body == b"".join(EVENTS)
    named = EngineTls(ca=certificates / "ca.pem", server_name="localhost", **shown)
    assert run(certificates, named, client, url="127.0.0.1").status == 200
    assert run(certificates, EngineTls(verify=False, **shown), client).status == 200


def test_an_engine_that_cannot_be_trusted(certificates: Path) -> None:
    shown = {"certificate": certificates / "client.pem", "key": certificates / "client.key"}
    client = client_context(certificates, "client")
    for tls in (
        EngineTls(**shown),
        EngineTls(ca=certificates / "stranger.pem", **shown),
        EngineTls(ca=certificates / "ca.pem", server_name="other", **shown),
    ):
        answer = run(certificates, tls, client)
        assert answer.status == 502 and b"certificate" in answer.body.lower()


def test_an_engine_that_does_not_trust_the_router(certificates: Path) -> None:
    answer = run(certificates, EngineTls(ca=certificates / "ca.pem"), client_context(certificates, "client"))
    assert answer.status == 502


@pytest.mark.parametrize("shows", [None, "stranger"])
def test_a_client_without_a_certificate_is_not_served(certificates: Path, shows: str | None) -> None:
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        run(certificates, EngineTls(ca=certificates / "ca.pem"), client_context(certificates, shows))


def test_files_that_do_not_work_are_named(certificates: Path) -> None:
    with pytest.raises(RouterConfigError, match=r"http\.tls: certificate .*ca\.pem with key .*client\.key"):
        ServerTls(certificate=certificates / "ca.pem", key=certificates / "client.key").context()
    with pytest.raises(RouterConfigError, match=r"http\.engine_tls\.ca: .*absent\.pem"):
        EngineTls(ca=certificates / "absent.pem").context()


@pytest.mark.parametrize(
    "url", ["engine:8000", "ftp://engine", "http://", "http://engine/v1", "http://engine?x", "http://engine:99999"]
)
def test_an_engine_s_address_has_a_form(url: str) -> None:
    async def make() -> None:
        Upstream(url)

    with pytest.raises(RouterConfigError, match="http://host:port|Port out of range"):
        asyncio.run(make())


def test_no_side_waits_for_more_to_send() -> None:
    """sglang-router 0.3.2 adds 33 ms to a first token: Nagle's algorithm and delayed acknowledgements."""

    async def main() -> None:
        engine = Engine()
        await engine.start()
        upstream = Upstream(f"http://127.0.0.1:{engine.port}")
        delays: list[int] = []

        async def handler(exchange: Exchange) -> None:
            response = await upstream.send(b"GET", b"/", [], b"")
            for transport in (exchange.transport, response.connection._transport):  # type: ignore[attr-defined]
                sock = transport.get_extra_info("socket")
                delays.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            await relay(response, exchange)

        server = HttpServer(handler)
        port = await server.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request())
        await asyncio.wait_for(read_answer(reader), WAIT_S)
        writer.close()
        await server.drain(0)
        await upstream.close()
        await engine.stop()
        assert delays == [1, 1]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
