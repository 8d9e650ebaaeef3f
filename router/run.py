"""Entry point of a worker's process: `python -m deepinfer_router.run FD`, its channel to the supervisor."""

import logging
import signal
import socket
import sys

import uvloop

from deepinfer_router.channel import receive
from deepinfer_router.plain_section import instead_of_pydantic


def main() -> None:
    """Serve until told otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s", stream=sys.stderr
    )
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        boot = receive(channel)
    except EOFError:
        return
    channel.setblocking(False)
    instead_of_pydantic()
    from deepinfer_router.app import App
    from deepinfer_router.worker import Worker

    uvloop.run(Worker(boot, channel, App).run())


if __name__ == "__main__":
    main()
