"""What prompts of 1 MB do to everybody else: how late the router's event loop is, and what a small request waits."""

from __future__ import annotations

import contextlib
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

from proxy import contenders
from proxy.contenders import Running
from proxy.rounds import CHAT
from proxy.tools import engines, load, request

MEGABYTE = {**CHAT, "messages": [{"role": "user", "content": "ten bytes " * 104_858}]}
LARGE_A_SECOND = 10.0
SMALL_A_SECOND = 100.0
_BUCKET = re.compile(r'^deepinfer_router_loop_lag_seconds_bucket\{.*le="([^"]+)"\} (\S+)$', re.MULTILINE)


def measure(scratch: Path, seconds: float, config: str = "") -> dict[str, Any]:
    """Milliseconds: p99 of the loop's lag (the bucket that it is in), and of a small request, with and without."""
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(engines(2, scratch))
        settings = ["--engines", ",".join(urls)]
        running = stack.enter_context(contenders.ours(scratch, "large", settings, config))
        alone = _small(running, scratch, seconds)
        before = _lag(running)
        background = threading.Thread(target=_large, args=(running, scratch, seconds))
        background.start()
        beside = _small(running, scratch, seconds)
        background.join()
        after = _lag(running)
    return {
        "loop_lag_p99_ms": _p99(before, after) * 1e3,
        "small_alone_ms": [value / 1e3 for value in alone],
        "small_beside_ms": [value / 1e3 for value in beside],
    }


def _small(running: Running, scratch: Path, seconds: float) -> list[float]:
    taken = load(running.port, request(CHAT), scratch, connections=1, seconds=seconds, warmup=0.5, rate=SMALL_A_SECOND)
    times: list[float] = taken.load["time_us"]
    return times


def _large(running: Running, scratch: Path, seconds: float) -> None:
    beside = scratch / "large"
    beside.mkdir(exist_ok=True)
    load(
        running.port,
        request(MEGABYTE),
        beside,
        connections=4,
        seconds=seconds + 0.5,
        warmup=0.0,
        rate=LARGE_A_SECOND,
    )


def _lag(running: Running) -> dict[float, float]:
    """Cumulative counts by upper bound, of all workers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{running.admin_port}/metrics", timeout=10) as answer:
        found: dict[float, float] = {}
        for bound, count in _BUCKET.findall(answer.read().decode()):
            found[float(bound)] = found.get(float(bound), 0.0) + float(count)
        return found


def _p99(before: dict[float, float], after: dict[float, float]) -> float:
    """The least bound that 99 % of what came in between is below, in seconds; infinite where nothing came."""
    grown = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = max(grown.values(), default=0.0)
    return next((bound for bound, count in grown.items() if total and count >= 0.99 * total), float("inf"))
