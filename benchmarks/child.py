"""A process that answers each line it is given with a line: engines that take turns have one each."""

from __future__ import annotations

import os
import subprocess
import sys

ANSWER = "answer "
"""What a line of the child begins with that is an answer; the libraries it loads print too."""


class Child:
    """`python SCRIPT ARGUMENTS`, which answers with an empty line when it is ready."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **environment},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._by_hand = " ".join(arguments)

    def ready(self) -> None:
        """Wait until it is. Raises RuntimeError if it ends instead."""
        self._read()

    def ask(self, line: str) -> str:
        """Its answer. Raises RuntimeError if it ends instead."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER.rstrip()):
                return line[len(ANSWER) :].strip()
        raise RuntimeError(f"The engine's process ended; run `python {self._by_hand}` by hand to see why")

    def close(self) -> None:
        """Let it end, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def answer(text: str = "") -> None:
    """In the child: say it."""
    print(f"{ANSWER}{text}", flush=True)
