"""The other side of `grammar_process`: python -m deepinfer_router.grammar_child BACKEND MEMORY_BYTES."""

import os
import resource
import signal
import sys

import orjson

from deepinfer_router.grammar_verdict import verdict

LONGEST_SECONDS = 120.0
"""Then it ends, should the router have been killed meanwhile."""


def main() -> None:
    """Answer until the input ends."""
    backend, memory_bytes = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the router, which closes our input
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write, flush = sys.stdout.buffer.write, sys.stdout.buffer.flush
    write(b"ready\n")
    flush()
    for line in sys.stdin.buffer:
        kind, text = orjson.loads(line)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
        try:
            found = verdict(kind, text, backend)
        except MemoryError:
            os.abort()  # as the library does
        write(orjson.dumps(list(found)) + b"\n")
        signal.setitimer(signal.ITIMER_REAL, 0)
        flush()


if __name__ == "__main__":
    main()
