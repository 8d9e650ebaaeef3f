"""Reads the configuration again while the router runs, in a process of its own that ends.

Checking takes pydantic, which neither supervisor nor workers have, and half a second of CPU.
"""

import subprocess
import sys
from collections.abc import Callable

import msgpack

from deepinfer_router.channel import Message
from deepinfer_router.poller import Poller

PATIENCE_S = 60.0


class Reading:
    """One process that reads it, seen from the supervisor."""

    def __init__(self, poller: Poller, source: Message, config: bytes, done: Callable[[Message], None]) -> None:
        """`done` is told `config`, `engines` and `needs_restart` (sections that a reload does not change), or a `line`.

        `config`: what holds now, pickled.
        """
        self._poller = poller
        self._done = done
        self._said = b""
        command = [sys.executable, "-P", "-m", "deepinfer_router.reload"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            line = f"no process could be started: {error.strerror}"
            poller.call(lambda: done({"line": line}))
            return
        assert self._process.stdin and self._process.stdout
        self._out = self._process.stdout
        self._process.stdin.write(msgpack.packb({"source": source, "config": config}))
        self._process.stdin.close()
        poller.watch(self._out, self._readable)
        poller.later(PATIENCE_S, self._give_up)

    def _give_up(self) -> None:
        if self._process.returncode is None:
            self._process.kill()  # a file system that does not answer, for example

    def _readable(self) -> None:
        data = self._out.read1(1 << 16)  # type: ignore[attr-defined] # a BufferedReader
        self._said += data
        if data:
            return
        self._poller.forget(self._out)
        self._out.close()
        self._process.wait()
        try:
            self._done(msgpack.unpackb(self._said))
        except ValueError:
            self._done({"line": f"the process that reads it ended with exit code {self._process.returncode}"})


def main() -> None:
    """The process."""
    import pickle

    from deepinfer_router.config import HOT
    from deepinfer_router.config_source import ConfigSource
    from deepinfer_router.errors import RouterConfigError
    from deepinfer_router.startup import prepare

    asked = msgpack.unpackb(sys.stdin.buffer.read())
    before = pickle.loads(asked["config"])
    answer: Message
    try:
        _, boot = prepare(ConfigSource.of(asked["source"]))
        read = pickle.loads(boot.config)
        # A worker that is replaced later must not differ from the others in what waits for a restart.
        config = before.model_copy(update={name: getattr(read, name) for name in HOT})
        answer = {
            "config": pickle.dumps(config),
            "engines": boot.engines,
            "needs_restart": before.fixed_differences(read),
        }
    except RouterConfigError as error:
        answer = {"line": str(error)}
    sys.stdout.buffer.write(msgpack.packb(answer))


if __name__ == "__main__":
    main()
