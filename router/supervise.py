"""Entry point of the supervisor's process: `python -m deepinfer_router.supervise FD`, the boot on that descriptor."""

import os
import resource
import socket
import sys
from threading import Event

import msgpack

from deepinfer_router.admin import Admin
from deepinfer_router.admin_http import AdminServer
from deepinfer_router.boot import Boot
from deepinfer_router.discovery import sources, start
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.poller import Poller
from deepinfer_router.supervisor import Supervisor, say


def replace_process(boot: Boot) -> None:
    """Become the supervisor. What this process has loaded so far is given back. Raises OSError."""
    reading = os.memfd_create("boot", 0)
    os.write(reading, msgpack.packb(boot._asdict()))
    os.lseek(reading, 0, os.SEEK_SET)
    os.set_inheritable(reading, True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "deepinfer_router.supervise", str(reading)])


def reserve(host: str, port: int) -> socket.socket:
    """Hold a port for workers, which listen on it with SO_REUSEPORT. The socket itself never listens.

    Raises OSError: it cannot be had; somebody listening there with SO_REUSEPORT too counts, though the kernel would let
    both.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    held = None
    try:
        for reuse_port in (False, True):
            sock = socket.socket(family, kind, protocol)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held = sock
            sock.bind(address)
            if not reuse_port:
                address = sock.getsockname()
                sock.close()
    except OSError:
        if held:
            held.close()
        raise
    assert held
    return held


def main() -> int:
    """Run the supervisor that the descriptor describes; the exit code."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        boot = Boot(**msgpack.unpackb(file.read()))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # workers': two descriptors a request
    host, port = boot.listen
    try:
        held = reserve(host, port)
    except OSError as error:
        say(f"--listen {host}:{port}: {_why(error)}: stop what has it, or choose another port")
        return 1
    with held:
        return _run(boot._replace(listen=(host, held.getsockname()[1])))


def _run(boot: Boot) -> int:
    poller = Poller()
    supervisor = Supervisor(boot, poller)
    try:
        for source in sources(boot.discovery):
            start(source, supervisor, Event())
    except RouterConfigError as error:
        say(str(error))
        return 1
    if boot.admin:
        host, port = boot.admin
        try:
            admin = AdminServer(host, port, Admin(supervisor, boot.admin_token))
        except OSError as error:
            say(f"--admin {host}:{port}: {_why(error)}: choose another port, or --admin '' for none")
            return 1
        admin.start()
        say(f"metrics and status page at http://{host}:{admin.port}/")
    return supervisor.run()


def _why(error: OSError) -> str:
    known = error.errno is not None and error.errno > 0  # those of getaddrinfo are not
    return os.strerror(error.errno) if known and error.errno else str(error.strerror)


if __name__ == "__main__":
    sys.exit(main())
