"""Checks what answers must look like before an engine is asked, in a process of its own, each constraint once."""

import asyncio
from collections import OrderedDict
from hashlib import sha256

from deepinfer_router.errors import Refusal
from deepinfer_router.grammar_config import GrammarConfig
from deepinfer_router.grammar_form import Form, Verdict, form_of
from deepinfer_router.grammar_process import GrammarProcess
from deepinfer_router.metrics import FAST_SECONDS, counter, histogram
from deepinfer_router.request import Request

GRAMMARS = counter(
    "grammars", "Constraints by verdict: ok, refused, costly, too_large, unread, busy (went unread).", "verdict"
)
GRAMMAR_SECONDS = histogram("grammar_seconds", "What reading a new one took, with waiting.", buckets=FAST_SECONDS)

MAX_READING = 32
"""That wait for their turn; what comes then goes unread."""
UNREAD = Verdict("unread")
BUSY = Verdict("busy")


class Grammars:
    """On the event loop."""

    def __init__(self, config: GrammarConfig) -> None:
        self._config = config
        self._process = GrammarProcess(config.backend, config.compile_s, config.memory_bytes)
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._reading: dict[bytes, asyncio.Task[Verdict]] = {}
        self._turn = asyncio.Lock()
        self._seconds = GRAMMAR_SECONDS.labels()

    async def check(self, request: Request) -> None:
        """Let a request through, unless engines would refuse its constraint, or it costs more than it may.

        Raises:
            Refusal: 400, with the reason.
        """
        form = form_of(request.api, request.fields)
        if form is None:
            return
        if len(form.text) > self._config.max_bytes:
            GRAMMARS.labels("too_large").inc()
            raise Refusal(
                400,
                "grammar_too_costly",
                f"{form.param} has {len(form.text)} characters, at most {self._config.max_bytes}: make it smaller",
                param=form.param,
            )
        found = await self._verdict(form)
        GRAMMARS.labels(found.word).inc()
        if found.word == "refused":
            message = f"{form.param} cannot be used: {found.reason}"
            raise Refusal(400, "invalid_grammar", message, param=form.param)
        if found.word == "costly":
            message = f"{form.param} is too costly: {found.reason}: make it simpler, with smaller counts"
            raise Refusal(400, "grammar_too_costly", message, param=form.param)

    async def close(self) -> None:
        """Idempotent."""
        for task in list(self._reading.values()):
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        await self._process.close()

    async def _verdict(self, form: Form) -> Verdict:
        digest = sha256(f"{form.kind}\0{form.text}".encode()).digest()
        if (found := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return found
        task = self._reading.get(digest)
        if task is None:
            if len(self._reading) >= MAX_READING:
                return BUSY
            task = self._reading[digest] = asyncio.create_task(self._read(digest, form))
        done, _ = await asyncio.wait((task,), timeout=self._config.wait_s)  # of a client that leaves, others may wait
        return task.result() if done else BUSY

    async def _read(self, digest: bytes, form: Form) -> Verdict:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with self._turn:
                found = await self._process.ask(form.kind, form.text)
        except OSError:  # no process: the engine reads it
            return UNREAD
        finally:
            del self._reading[digest]
        self._seconds.observe(clock() - began)
        self._known[digest] = found
        while len(self._known) > self._config.remembered:
            self._known.popitem(last=False)
        return found
