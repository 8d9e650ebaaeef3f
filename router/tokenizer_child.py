"""The other side of `tokenizer_process`: python -m deepinfer_router.tokenizer_child. Ends with its input."""

import os
import signal
import sys
from array import array
from typing import BinaryIO

from deepseek_recipe import Tokenizer

from deepinfer_router.tokenizer_process import LENGTH_BYTES


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the router, which closes our input
    os.nice(10)  # on a core that it shares with the event loop, that is to go first
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = Tokenizer.from_str(_received(source))
    while text := _received(source):
        answer = array("I", tokenizer.encode(text)).tobytes()
        sink.write(len(answer).to_bytes(LENGTH_BYTES, "little"))
        sink.write(answer)
        sink.flush()


def _received(source: BinaryIO) -> str:
    """Empty: there is nothing more."""
    return source.read(int.from_bytes(source.read(LENGTH_BYTES), "little")).decode()


if __name__ == "__main__":
    main()
