"""A worker process, as the supervisor holds it."""

import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from time import monotonic

from deepinfer_router.channel import READ_BYTES, Frames, Message, pack
from deepinfer_router.poller import Poller

MAX_UNSENT_BYTES = 64 << 20
"""Of messages to a worker that does not read them. Beyond that it is taken for hung."""


class WorkerProcess:
    """One life of one worker: its process and the channel to it. It ends when its end of the channel is closed."""

    def __init__(
        self,
        index: int,
        poller: Poller,
        on_message: Callable[["WorkerProcess", Message], None],
        on_end: Callable[["WorkerProcess"], None],
        command: Sequence[str],
    ) -> None:
        """Start `command` with the number of its channel. Raises OSError: no process or socket could be made."""
        self.index = index
        self.ready = False
        """It serves."""
        self.report: Message | None = None
        """What it said of itself last."""
        self.started_at = self.heard_at = monotonic()
        self._poller = poller
        self._on_message = on_message
        self._on_end = on_end
        self._frames = Frames()
        self._unsent = bytearray()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._channel.setblocking(False)
        poller.watch(self._channel, self._readable)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Give it a message; never waits. A worker that reads none is killed once too many wait."""
        self._unsent += pack(message)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.kill()
        else:
            self._write()

    def kill(self) -> None:
        """End it at once."""
        self._process.send_signal(signal.SIGKILL)

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._channel.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return  # it has ended: reading says so
        self._poller.watch(self._channel, self._readable, write=bool(self._unsent))

    def _readable(self) -> None:
        try:
            data = self._channel.recv(READ_BYTES)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"":
            self._ended()
            return
        if data:
            self.heard_at = monotonic()
            for message in self._frames.feed(data):
                self._on_message(self, message)
        if self._unsent:
            self._write()

    def _ended(self) -> None:
        self.ready = False
        self._poller.forget(self._channel)
        self._channel.close()
        self.kill()  # a process that closed its channel and lives on could not be told anything
        self._process.wait()
        self._on_end(self)

    @property
    def how_it_ended(self) -> str:
        """In words."""
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
