"""Processes that encode long texts, for the event loop's sake.

Recipe's tokenizer holds the interpreter lock while it hands out its tokens, 40 ms for those of a megabyte.
"""

import subprocess
import sys
from array import array
from collections import deque

LENGTH_BYTES = 8
"""Before each message the number of its bytes, little endian. The first is the tokenizer, each other a text in UTF-8;
answers are tokens, four bytes each as this machine has them."""
_COMMAND = (sys.executable, "-P", "-m", "deepinfer_router.tokenizer_child")


class TokenizerProcesses:
    """One for each thread that encodes at the same time, started when first needed. Thread-safe."""

    def __init__(self, tokenizer: bytes) -> None:
        """`tokenizer`: its JSON."""
        self._tokenizer = tokenizer
        self._idle: deque[subprocess.Popen[bytes]] = deque()
        self._closed = False

    def encode(self, text: str) -> "array[int]":
        """Waits for its tokens. Raises OSError: a process cannot be started, or has ended."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        try:
            _send(process, text.encode())
            tokens = _receive(process)
        except BaseException:
            _end(process)
            raise
        self._idle.append(process)
        if self._closed:
            self.close()
        return tokens

    def close(self) -> None:
        """End them; one that encodes ends when it has. Idempotent."""
        self._closed = True
        while self._idle:
            _end(self._idle.pop())

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            _send(process, self._tokenizer)
        except BaseException:
            _end(process)
            raise
        return process


def _send(process: "subprocess.Popen[bytes]", message: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(len(message).to_bytes(LENGTH_BYTES, "little"))
    process.stdin.write(message)
    process.stdin.flush()


def _receive(process: "subprocess.Popen[bytes]") -> "array[int]":
    assert process.stdout is not None
    size = int.from_bytes(process.stdout.read(LENGTH_BYTES), "little")
    message = process.stdout.read(size)
    if not size or len(message) < size:  # no text has no tokens
        raise OSError("it has ended")
    tokens = array("I")
    tokens.frombytes(message)
    return tokens


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
