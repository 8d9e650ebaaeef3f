"""What vLLM's /metrics says of an engine's load: a few series, found without reading the rest.

Names are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`); the label `engine` is the data-parallel rank. A page has
some hundred KB of histograms, so lines are searched and not parsed. The text may be anything: what is not understood,
not finite or negative is not there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

MAX_BYTES = 8 << 20
"""A page that is longer is not read."""
_MOST_TOKENS = 1 << 40
_MOST_LINES = 4096


@dataclass(slots=True)
class Reading:
    """One rank at one time."""

    running: int | None = None
    waiting: int = 0
    kv_share: float | None = None
    """Of its KV blocks that requests hold, 0 to 1."""
    capacity_tokens: int | None = None
    steps: float = 0.0
    """Grows while the engine works: steps that it counted, tokens of prompts and answers."""
    gaps: float = 0.0
    """Gaps between two tokens of an answer that were measured, ever."""
    gap_seconds: float = 0.0
    """Their sum."""

    @property
    def active(self) -> int | None:
        """Requests there; None: it does not say."""
        return None if self.running is None else self.running + self.waiting

    @property
    def kv_tokens(self) -> int | None:
        """KV tokens that are held there; None: it does not say."""
        if self.kv_share is None or self.capacity_tokens is None:
            return None
        return int(self.kv_share * self.capacity_tokens)


def read_metrics(page: bytes, ranks: int) -> list[Reading]:
    """A reading a rank. An engine of one rank may call itself by any number."""
    readings = [Reading() for _ in range(ranks)]
    page = b"\n" + page

    def each(name: bytes) -> Iterator[tuple[Reading, float, bytes]]:
        for labels, value in _series(page, name):
            rank = 0 if ranks == 1 else _number(_label(labels, b"engine"))
            if rank is not None and 0 <= rank < ranks:
                yield readings[int(rank)], value, labels

    for reading, value, _ in each(b"vllm:num_requests_running"):
        reading.running = (reading.running or 0) + int(min(value, _MOST_TOKENS))
    for reading, value, _ in each(b"vllm:num_requests_waiting"):
        reading.waiting += int(min(value, _MOST_TOKENS))
    for reading, value, _ in each(b"vllm:kv_cache_usage_perc"):
        reading.kv_share = max(reading.kv_share or 0.0, min(1.0, value))
    for reading, _, labels in each(b"vllm:cache_config_info"):
        reading.capacity_tokens = _capacity(labels)
    for name in (b"vllm:iteration_tokens_total_count", b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total"):
        for reading, value, _ in each(name):
            reading.steps += value
    for reading, value, _ in each(b"vllm:inter_token_latency_seconds_count"):
        reading.gaps += value
    for reading, value, _ in each(b"vllm:inter_token_latency_seconds_sum"):
        reading.gap_seconds += value
    return readings


def _capacity(labels: bytes) -> int | None:
    # The first is right where caches come in groups of several kinds; older engines do not say it.
    tokens = _number(_label(labels, b"kv_cache_size_tokens"))
    if not tokens:
        blocks, size = _number(_label(labels, b"num_gpu_blocks")), _number(_label(labels, b"block_size"))
        tokens = blocks * size if blocks and size else None
    return int(tokens) if tokens and tokens <= _MOST_TOKENS else None


def _series(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """(labels, value) of each line `name{labels} value`; the page begins with a line's end."""
    start = b"\n" + name + b"{"
    at = page.find(start)
    for _ in range(_MOST_LINES):
        if at < 0:
            return
        end = page.find(b"\n", at + 1)
        line = page[at + len(start) : end if end >= 0 else len(page)]
        close = line.rfind(b"}")
        after = line[close + 1 :].split(None, 1)
        value = _number(after[0]) if close >= 0 and after else None
        if value is not None:
            yield line[:close], value
        at = page.find(start, at + 1)


def _label(labels: bytes, name: bytes) -> bytes:
    """The value of a label; quotes inside values are escaped, so that `name="` stands only where a label begins."""
    quoted = name + b'="'
    at = labels.find(quoted)
    while at > 0 and labels[at - 1 : at] != b",":
        at = labels.find(quoted, at + 1)
    if at < 0:
        return b""
    begin = at + len(quoted)
    end = labels.find(b'"', begin)
    return labels[begin:end] if end >= 0 else b""


def _number(text: bytes) -> float | None:
    """A finite number that is not negative."""
    try:
        value = float(text) if len(text) < 40 else -1.0
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None
