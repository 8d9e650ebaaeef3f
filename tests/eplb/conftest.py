"""What the plugin says in vLLM's log."""

import logging
from collections.abc import Iterator

import pytest

Said = list[tuple[str, str]]


class _Kept(logging.Handler):
    def __init__(self, said: Said) -> None:
        super().__init__(logging.INFO)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append((record.levelname, record.getMessage()))


@pytest.fixture
def said() -> Iterator[Said]:
    """Levels and messages, each once: pytest's own fixture has them twice or not at all, as vLLM was loaded or not."""
    kept: Said = []
    logger, handler = logging.getLogger("vllm.deepinfer"), _Kept(kept)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield kept
    logger.removeHandler(handler)
    logger.setLevel(level)
