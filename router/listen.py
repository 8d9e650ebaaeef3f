"""Listening sockets."""

import socket


def listening_socket(host: str, port: int, *, reuse_port: bool = False, backlog: int = 4096) -> socket.socket:
    """A TCP socket on `host` (a name or an address; empty: all of both families) that accepts without Nagle's delay.

    `reuse_port`: several processes may listen, and the kernel spreads connections over them. Raises OSError.
    """
    found = socket.getaddrinfo(host or "::", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if not host else 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host or '*'}:{port}: {error.strerror}") from error
    return sock
