"""Engines behind a name: one an address, or one an SRV record."""

import socket
from threading import Event
from typing import Any, NamedTuple

from deepinfer_router.discovery import Failed, Found, Source, bracketed, plain_engine
from deepinfer_router.errors import RouterConfigError


class _Place(NamedTuple):
    host: str
    port: int


class DnsSource:
    """Addresses of a name, by the system's resolver. For SRV records see `SrvSource`."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.name = f"dns {section['name']}"
        self._section = section

    def run(self, found: Found, failed: Failed, stop: Event) -> None:
        """See `discovery.Source`. An empty answer counts as a failure: resolvers give one for a service without a
        ready pod as well as in trouble, and dead engines are known by their health."""
        while True:
            try:
                places = sorted(set(self.look_up()))
                if not places:
                    failed(f"{self._section['name']}: no records")
                else:
                    found([self._engine(place) for place in places])
            except OSError as error:
                failed(f"{self._section['name']}: {error.strerror or error}")
            if stop.wait(self._section["interval_s"]):
                return

    def look_up(self) -> list[_Place]:
        """Raises OSError."""
        answers = socket.getaddrinfo(self._section["name"], self._section["port"], type=socket.SOCK_STREAM)
        return [_Place(str(address[0]), int(address[1])) for *_, address in answers]

    def _engine(self, place: _Place) -> dict[str, Any]:
        id = f"{bracketed(place.host)}:{place.port}"
        return plain_engine(id, f"{self._section['scheme']}://{id}", self._section)


class SrvSource(DnsSource):
    """Targets of SRV records, which bring their ports. Priorities and weights are not heeded: load decides."""

    def __init__(self, section: dict[str, Any]) -> None:
        """Raises RouterConfigError: dnspython is not installed."""
        super().__init__(section)
        try:
            import dns.resolver
        except ModuleNotFoundError:
            raise RouterConfigError(
                'discovery.dns: SRV records need dnspython: pip install "deepinfer-vllm[dns]"'
            ) from None
        try:
            self._resolver = dns.resolver.Resolver(configure=not section["nameservers"])
        except dns.resolver.NoResolverConfiguration:
            raise RouterConfigError("discovery.dns: /etc/resolv.conf names no server: list nameservers") from None
        if section["nameservers"]:
            self._resolver.nameservers = [_nameserver(text) for text in section["nameservers"]]

    def look_up(self) -> list[_Place]:
        """Raises OSError."""
        import dns.exception

        try:
            answer = self._resolver.resolve(self._section["name"], "SRV", lifetime=self._section["interval_s"])
        except dns.exception.DNSException as error:
            raise OSError(" ".join(str(error).split()) or type(error).__name__) from None
        return [_Place(record.target.to_text(omit_final_dot=True), record.port) for record in answer]


def _nameserver(text: str) -> Any:
    import dns.nameserver

    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and ":" not in host.strip("[]"):
        return dns.nameserver.Do53Nameserver(host.strip("[]"), int(port))
    return dns.nameserver.Do53Nameserver(text.strip("[]"))


def source_of(section: dict[str, Any]) -> Source:
    """The source of a DnsConfig of plain types. Raises RouterConfigError."""
    return SrvSource(section) if section["srv"] else DnsSource(section)
