"""Engines behind names: the system's resolver for addresses, a name server on this host for SRV records."""

import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from typing import Any

import dns.message
import dns.rrset
import pytest
from listening_source import listening

from deepinfer_router.discovery import Source, sources
from deepinfer_router.discovery_config import DiscoveryConfig
from deepinfer_router.errors import RouterConfigError


def source(**section: Any) -> Source:
    config = DiscoveryConfig.model_validate({"dns": [{"interval_s": 0.05, **section}]})
    (found,) = sources(config.model_dump(mode="json"))
    return found


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of names, to be changed; others do not exist. Names of this host alone would be no test."""
    known: dict[str, list[str]] = {}

    def look_up(name: str, port: int, type: int) -> list[Any]:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", (address, port)) for address in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def test_each_address_is_an_engine(answers: dict[str, list[str]]) -> None:
    answers["engines.local"] = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
    with listening(source(name="engines.local", port=8001, roles=["decode"], ranks=2)) as heard:
        heard.until(lambda: heard.sets)
        assert heard.urls() == ["http://10.0.0.1:8001", "http://10.0.0.2:8001", "http://[fd00::1]:8001"]
        assert heard.sets[0][0] == {
            "id": "10.0.0.1:8001",
            "url": "http://10.0.0.1:8001",
            "roles": ["decode"],
            "models": [],
            "ranks": 2,
            "capacity_tokens": None,
            "engine_class": "",
            "draining": False,
        }
        answers["engines.local"] = ["10.0.0.3"]
        heard.until(lambda: heard.urls() == ["http://10.0.0.3:8001"])


def test_engines_stay_while_names_cannot_be_looked_up(answers: dict[str, list[str]]) -> None:
    answers["engines.local"] = ["10.0.0.1"]
    with listening(source(name="engines.local")) as heard:
        heard.until(lambda: heard.sets)
        del answers["engines.local"]
        heard.until(lambda: heard.lines)
        assert heard.lines[0] == "engines.local: Name or service not known"
        answers["engines.local"] = []
        heard.until(lambda: heard.lines[-1] == "engines.local: no records")
        assert heard.urls() == ["http://10.0.0.1:8000"]


def test_the_real_resolver_is_asked() -> None:
    with listening(source(name="localhost", port=1234)) as heard:
        heard.until(lambda: heard.sets)
        assert "http://127.0.0.1:1234" in heard.urls() or "http://[::1]:1234" in heard.urls()


class NameServer(socketserver.UDPServer):
    """Answers every question with the same SRV records, or with a refusal where there are none."""

    records: list[str] = []

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Question)


class _Question(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        data, sock = self.request
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        assert isinstance(self.server, NameServer)
        if self.server.records:
            answer.answer.append(dns.rrset.from_text(query.question[0].name, 1, "IN", "SRV", *self.server.records))
        else:
            answer.set_rcode(dns.rcode.REFUSED)
        sock.sendto(answer.to_wire(), self.client_address)


@pytest.fixture
def name_server() -> Iterator[NameServer]:
    with NameServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_srv_records_bring_their_ports(name_server: NameServer) -> None:
    name_server.records = ["0 5 8001 one.engines.local.", "0 5 8002 two.engines.local."]
    at = f"127.0.0.1:{name_server.server_address[1]}"
    with listening(source(name="_vllm._tcp.engines.local", srv=True, nameservers=[at])) as heard:
        heard.until(lambda: heard.sets)
        assert heard.urls() == ["http://one.engines.local:8001", "http://two.engines.local:8002"]
        name_server.records = []
        heard.until(lambda: heard.lines)
        assert heard.lines[0].startswith("_vllm._tcp.engines.local: ")
        name_server.records = ["0 5 8003 three.engines.local."]
        heard.until(lambda: heard.urls() == ["http://three.engines.local:8003"])


def test_srv_records_need_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.resolver", None)
    with pytest.raises(RouterConfigError, match=r'SRV records need dnspython: pip install "deepinfer-vllm\[dns\]"'):
        source(name="_vllm._tcp.engines.local", srv=True)
