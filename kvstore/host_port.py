"""Addresses as people write them."""

from deepinfer_kvstore.errors import StoreConfigError


def host_port(option: str, text: str) -> tuple[str, int]:
    """The two parts of HOST:PORT. An IPv6 address stands in brackets; they are taken away.

    Raises:
        StoreConfigError: not that; `option` is named.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise StoreConfigError(f"{option} {text!r} must be HOST:PORT, as 10.0.0.7:9400")
    return host.strip("[]"), int(port)
