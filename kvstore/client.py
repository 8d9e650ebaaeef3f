"""Asks a CHECK server, from any thread. Whatever the server does, an answer comes in time: at worst, nothing found."""

import socket
import ssl
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from time import monotonic

from deepinfer_kvstore.patience import Patience
from deepinfer_kvstore.protocol import (
    LENGTH,
    MAX_FRAME_BYTES,
    VERSION,
    Code,
    Held,
    Message,
    ProtocolError,
    pack,
    read_held,
    read_reply,
    unpack,
)
from deepinfer_kvstore.questions import UNANSWERED, Answer, Question, Questions, unanswered
from deepinfer_kvstore.snapshot_wire import receive_exactly, remaining

BUDGET_SECONDS = 0.005
"""What a caller waits for an answer, without the hashing."""
CONNECT_SECONDS = 2.0
"""What a connection may take to come about; callers do not wait for that."""

Address = Path | tuple[str, int]
"""A unix socket (see `socket_path`), or host and port."""


class CheckClient:
    """One connection to one server, made anew whenever it is lost. Thread-safe.

    `failures` counts questions without an answer, by reason: see `Answer.reason`.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        budget_seconds: float = BUDGET_SECONDS,
        compiled: bool = True,
    ) -> None:
        """`token` and `tls` as the server wants them over TCP. Connects when first asked."""
        self.failures: Counter[str] = Counter()
        self._address = address
        self._hello = pack({"op": "hello", "version": VERSION, "token": token})
        self._tls = tls
        self._budget_seconds = budget_seconds
        self._questions = Questions(compiled=compiled)
        self._patience = Patience()
        self._connection: socket.socket | None = None
        self._connecting: Future[socket.socket] | None = None
        self._closed = False
        self._lock = Lock()

    def check(self, question: Question) -> Answer:
        """One question. See `check_many`."""
        return self.check_many([question])[0]

    def check_many(self, questions: Sequence[Question]) -> list[Answer]:
        """Questions that travel together, answered in order.

        Raises:
            ValueError: the caller's fault: token ids that are none, too many questions at once. Never for the server's.
        """
        spent, dialogue = 0.0, self._questions.ask(questions)
        try:
            message = next(dialogue)
            while True:
                began = monotonic()
                answer = self._exchange(message, began + self._budget_seconds - spent)
                spent += monotonic() - began
                message = dialogue.send(answer)
        except StopIteration as end:
            answers: list[Answer] = end.value
        except UNANSWERED as error:
            answers = unanswered(error, len(questions))
        self.failures.update(answer.reason for answer in answers if answer.reason)
        return answers

    def redeem(self, ticket: bytes) -> Held | None:
        """What a ticket holds, where it still lies; None where it is unknown, over, or cannot be asked for in time."""
        try:
            return read_held(self._exchange({"op": "redeem", "ticket": ticket}, monotonic() + self._budget_seconds))
        except UNANSWERED as error:
            self.failures.update(answer.reason for answer in unanswered(error, 1))
            return None

    def release(self, ticket: bytes) -> None:
        """Say that a ticket is needed no more. It ends by itself as well."""
        with suppress(*UNANSWERED):
            self._exchange({"op": "release", "ticket": ticket}, monotonic() + self._budget_seconds)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            self._drop()

    def _exchange(self, message: Message, deadline: float) -> Message:
        if not self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
            raise TimeoutError("another thread is asking")
        try:
            frame = pack(message)
            if self._connection:
                try:
                    return self._exchange_on(self._connection, frame, deadline)
                except TimeoutError:
                    self._patience.failed()
                    raise
                except OSError:
                    pass  # the server has closed what was idle, or was started anew: once more
            connection = self._connected(deadline)
            try:
                answer = self._exchange_on(connection, frame, deadline)
            except BaseException:
                self._patience.failed()
                raise
            self._patience.succeeded()
            return answer
        finally:
            self._lock.release()

    def _exchange_on(self, connection: socket.socket, frame: bytes, deadline: float) -> Message:
        try:
            return exchange(connection, frame, deadline)
        except BaseException:
            self._drop()  # or the next answer would be this question's
            raise

    def _connected(self, deadline: float) -> socket.socket:
        """The connection. A new one comes about in a thread, which goes on if the caller cannot wait.

        Raises:
            OSError: there is none in time.
            ProtocolError: the server refuses us.
        """
        if self._connection:
            return self._connection
        if self._closed or (self._connecting is None and not self._patience.over()):
            raise ConnectionError("closed, or it is too early for another try")
        if self._connecting is None:
            self._connecting = Future()
            Thread(target=self._connect, args=(self._connecting,), name="check-connect", daemon=True).start()
        try:
            self._connection = self._connecting.result(remaining(deadline))
        except BaseException:
            if self._connecting.done():
                self._connecting = None
                self._patience.failed()
            raise
        self._connecting = None
        return self._connection

    def _connect(self, future: "Future[socket.socket]") -> None:
        deadline = monotonic() + CONNECT_SECONDS
        connection = None
        try:
            connection = _open(self._address, self._tls)
            read_greeting(exchange(connection, self._hello, deadline))
        except Exception as error:
            if connection:
                connection.close()
            future.set_exception(error)
        else:
            future.set_result(connection)

    def _drop(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._connecting:
            self._connecting.add_done_callback(_close_result)
            self._connecting = None


def exchange(connection: socket.socket, frame: bytes, deadline: float) -> Message:
    """Send a frame and return the answer to it.

    Raises:
        OSError: not by `deadline` (of `monotonic`), or the connection is lost.
        ProtocolError: what came is no answer.
    """
    connection.settimeout(remaining(deadline))
    connection.sendall(frame)
    (size,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size, deadline))
    return unpack(receive_exactly(connection, bounded(size), deadline))


def bounded(size: int) -> int:
    """The size of an answer's body. Raises ProtocolError where it is beyond all answers."""
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(Code.MALFORMED, f"an answer of {size} bytes: at most {MAX_FRAME_BYTES} are read")
    return size


def read_greeting(message: Message) -> None:
    """Raises ProtocolError where the server refuses us."""
    if "error" in message:
        read_reply(message)
    if message.get("version") != VERSION:
        raise ProtocolError(Code.VERSION, f"the server speaks version {message.get('version')!r}, we {VERSION}")


def _open(address: Address, tls: ssl.SSLContext | None) -> socket.socket:
    if isinstance(address, Path):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(str(address))
        except BaseException:
            connection.close()
            raise
        return connection
    connection = socket.create_connection(address, CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection if tls is None else tls.wrap_socket(connection, server_hostname=address[0])


def _close_result(future: "Future[socket.socket]") -> None:
    if future.exception() is None:
        future.result().close()
