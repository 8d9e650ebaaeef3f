"""A process that reads constraints: one can take minutes, or all memory, and a thread cannot be ended.

It answers JSON lines on its standard output to those on its input, and ends with it.
"""

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress

import orjson

from deepinfer_router.grammar_form import Verdict

START_SECONDS = 20.0
"""What it may take to start, on a machine with other work."""


class GrammarProcess:
    """Started when first asked, and again after it had to be ended. One question at a time."""

    def __init__(self, backend: str, compile_s: float, memory_bytes: int) -> None:
        self._arguments = (backend, str(memory_bytes))
        self._compile_s = compile_s
        self._process: Process | None = None

    async def ask(self, kind: str, text: str) -> Verdict:
        """The verdict on one constraint; costly: it takes too long or too much memory.

        Raises:
            OSError: the process cannot be started, or somebody has ended it.
        """
        try:
            if self._process is not None and self._process.returncode is not None:
                await self.close()  # somebody has ended it
            process = self._process = self._process or await self._start()
            return await self._exchange(process, kind, text)
        except BaseException:
            await self.close()  # what it would still answer is nobody's
            raise

    async def close(self) -> None:
        """End it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _exchange(self, process: Process, kind: str, text: str) -> Verdict:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(orjson.dumps([kind, text]) + b"\n")
            async with asyncio.timeout(self._compile_s):
                line = await process.stdout.readline()
        except TimeoutError:
            await self.close()
            return Verdict("costly", f"reading it takes more than {self._compile_s:g} s")
        except ConnectionError:
            line = b""
        if not line:
            code = await process.wait()  # to kill it now would lose the code
            await self.close()
            if code == -signal.SIGABRT:
                return Verdict("costly", "reading it takes too much memory")
            raise OSError(f"it has ended with {code}")
        return Verdict(*orjson.loads(line))

    async def _start(self) -> Process:
        command = (sys.executable, "-m", "deepinfer_router.grammar_child", *self._arguments)
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=1 << 20)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await process.stdout.readline()
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise OSError(f"did not start within {START_SECONDS:g} s") from error
            raise
        if ready != b"ready\n":
            await _end(process)
            raise OSError("ended at its start")
        return process


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
