"""Asks a CHECK server from an event loop, as `CheckClient` does from threads."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from deepinfer_kvstore.client import BUDGET_SECONDS, CONNECT_SECONDS, Address, bounded, read_greeting
from deepinfer_kvstore.patience import Patience
from deepinfer_kvstore.protocol import LENGTH, VERSION, Message, pack, unpack
from deepinfer_kvstore.questions import UNANSWERED, Answer, Dialogue, Question, Questions, unanswered

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

THREAD_TOKENS = 1 << 15
"""Prompts that are longer in all are hashed in a thread: without a C compiler it takes long enough to be noticed."""


class _Slot:
    """Place of one connection."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.connecting: asyncio.Task[Stream] | None = None

    def drop(self) -> None:
        if self.stream:
            self.stream[1].transport.abort()
            self.stream = None
        if self.connecting:
            self.connecting.cancel()
            self.connecting = None


class AsyncCheckClient:
    """A few connections to one server, made anew whenever they are lost. For one event loop.

    `failures` counts questions without an answer, by reason: see `Answer.reason`.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        budget_seconds: float = BUDGET_SECONDS,
        connections: int = 4,
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
        self._slots = [_Slot() for _ in range(connections)]
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._closed = False

    async def check(self, question: Question) -> Answer:
        """One question. See `check_many`."""
        return (await self.check_many([question]))[0]

    async def check_many(self, questions: Sequence[Question]) -> list[Answer]:
        """Questions that travel together, answered in order.

        Raises:
            ValueError: the caller's fault: token ids that are none, too many questions at once. Never for the server's.
        """
        clock = asyncio.get_running_loop().time
        spent, dialogue = 0.0, self._questions.ask(questions)
        aside = sum(len(question.tokens) for question in questions) > THREAD_TOKENS
        try:
            step = await _advance(dialogue, None, aside)
            while isinstance(step, dict):
                began = clock()
                async with asyncio.timeout_at(began + self._budget_seconds - spent):
                    answer = await self._exchange(step)
                spent += clock() - began
                step = await _advance(dialogue, answer, aside)
            answers = step
        except UNANSWERED as error:
            answers = unanswered(error, len(questions))
            if isinstance(error, TimeoutError):  # to the exchange it is a caller that has gone
                self._patience.failed()
        self.failures.update(answer.reason for answer in answers if answer.reason)
        return answers

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        for slot in self._slots:
            slot.drop()

    async def _exchange(self, message: Message) -> Message:
        frame = pack(message)
        slot = await self._free.get()
        try:
            if slot.stream:
                try:
                    return await self._exchange_on(slot, slot.stream, frame)
                except (ConnectionError, EOFError):
                    pass  # the server has closed what was idle, or was started anew: once more
            stream = await self._connected(slot)
            try:
                answer = await self._exchange_on(slot, stream, frame)
            except Exception:
                self._patience.failed()
                raise
            self._patience.succeeded()
            return answer
        finally:
            self._free.put_nowait(slot)

    async def _exchange_on(self, slot: _Slot, stream: Stream, frame: bytes) -> Message:
        try:
            return await _exchange(stream, frame)
        except BaseException:
            slot.drop()  # or the next answer would be this question's
            raise

    async def _connected(self, slot: _Slot) -> Stream:
        """The slot's connection. A new one comes about in a task, which goes on if the caller cannot wait.

        Raises:
            OSError, EOFError: there is none.
            ProtocolError: the server refuses us.
        """
        if slot.stream:
            return slot.stream
        if self._closed or (slot.connecting is None and not self._patience.over()):
            raise ConnectionError("closed, or it is too early for another try")
        if slot.connecting is None:
            slot.connecting = asyncio.create_task(self._connect())
            slot.connecting.add_done_callback(_look_at)
        try:
            slot.stream = await asyncio.shield(slot.connecting)
        except BaseException:
            if slot.connecting and slot.connecting.done():
                slot.connecting = None
                self._patience.failed()
            raise
        slot.connecting = None
        return slot.stream

    async def _connect(self) -> Stream:
        async with asyncio.timeout(CONNECT_SECONDS):
            if isinstance(self._address, Path):
                stream = await asyncio.open_unix_connection(self._address)
            else:
                stream = await asyncio.open_connection(*self._address, ssl=self._tls)
            try:
                read_greeting(await _exchange(stream, self._hello))
            except BaseException:
                stream[1].transport.abort()
                raise
            return stream


async def _advance(dialogue: Dialogue, answer: Message | None, aside: bool) -> Message | list[Answer]:
    """The next message of the dialogue, or what it ends with."""

    def step() -> Message | list[Answer]:
        try:
            return next(dialogue) if answer is None else dialogue.send(answer)
        except StopIteration as end:
            answers: list[Answer] = end.value
            return answers

    return await asyncio.to_thread(step) if aside else step()


def _look_at(connecting: asyncio.Task[Stream]) -> None:
    """Or asyncio would complain of an error that nobody waits for any more."""
    if not connecting.cancelled():
        connecting.exception()


async def _exchange(stream: Stream, frame: bytes) -> Message:
    reader, writer = stream
    writer.write(frame)
    await writer.drain()
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return unpack(await reader.readexactly(bounded(size)))
