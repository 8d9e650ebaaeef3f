"""Rounds of measurements, each of all proxies in an order that rotates: a ratio is of two measurements of a round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from proxy import contenders, store
from proxy.contenders import Running
from proxy.tools import Measured, engines, load, request

OURS, ROUND_ROBIN, CACHE_AWARE, HAPROXY = "ours", "vllm-router round_robin", "vllm-router cache_aware", "haproxy"
OURS_ALL = "ours, recipe and CHECK"
OURS_PD, VLLM_PD, DIRECT = "ours, P/D", "vllm-router, P/D", "direct"
CHAT = {
    "model": "mock",
    "messages": [{"role": "user", "content": "Say something short about a subject of your choice, please."}],
    "max_tokens": 16,
}
ENDLESS_TOKENS = 100_000
"""A stream that outlasts the measurement."""


class Contest(NamedTuple):
    """One load. `per`: what the CPU time is divided by, requests or events."""

    per: str
    data: bytes
    connections: int
    rate: float = 0.0
    warmup: float = 1.0


def stream(tokens_a_second: int, streams: int) -> Contest:
    """`streams` that have together so many tokens a second; 0: as many as are taken."""
    interval = {"interval_us": streams * 1_000_000 // tokens_a_second} if tokens_a_second else {}
    return Contest("events", request({**CHAT, "stream": True, "max_tokens": ENDLESS_TOKENS, **interval}), streams)


CONTESTS = {
    "request": Contest("requests", request(CHAT), 32),
    "request of 4 KB": Contest(
        "requests", request({**CHAT, "messages": [{"role": "user", "content": "word " * 800}]}), 32
    ),
    "request of 32 KB": Contest(
        "requests", request({**CHAT, "messages": [{"role": "user", "content": "word " * 6500}]}), 32
    ),
    "idle": Contest("requests", request(CHAT), 1, rate=200.0),
    "one connection": Contest("requests", request(CHAT), 1),
    "50,000 tokens/s": stream(50_000, 400),
    "20,000 tokens/s": stream(20_000, 400),
    "50,000 tokens/s, 1000 streams": stream(50_000, 1000),
    "flood": stream(0, 400),
}
PD_CONTESTS = ("request of 4 KB",)
"""A shorter prompt is not worth a second engine to ours, which then asks one alone."""
DIRECT_CONTESTS = ("idle", "one connection")
ALL_CONTESTS = ("request", "request of 4 KB", "request of 32 KB", "idle")


def measure(
    scratch: Path, rounds: int, seconds: float, vllm_router: str | None, haproxy: str | None, say: Callable[[str], None]
) -> list[dict[str, dict[str, Any]]]:
    """Of each round, by contest and proxy: CPU microseconds per request or event, latencies, memory, failures."""
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(engines(2, scratch))
        proxies: dict[str, Running | None] = {
            OURS: stack.enter_context(contenders.ours(scratch, "ours", ["--engines", ",".join(urls)])),
            OURS_PD: stack.enter_context(
                contenders.ours(scratch, "ours-pd", ["--prefill", urls[0], "--decode", urls[1]])
            ),
            DIRECT: None,
        }
        section, _ = stack.enter_context(store.daemon(scratch))
        config = store.recipe(scratch) + section
        settings = ["--engines", ",".join(urls)]
        proxies[OURS_ALL] = stack.enter_context(contenders.ours(scratch, "ours-all", settings, config))
        if vllm_router:
            for name, policy in ((ROUND_ROBIN, "round_robin"), (CACHE_AWARE, "cache_aware")):
                settings = ["--worker-urls", *urls, "--policy", policy]
                proxies[name] = stack.enter_context(contenders.vllm_router(scratch, policy, vllm_router, settings))
            settings = [
                "--vllm-pd-disaggregation",
                "--prefill",
                urls[0],
                "--decode",
                urls[1],
                "--policy",
                "round_robin",
            ]
            proxies[VLLM_PD] = stack.enter_context(contenders.vllm_router(scratch, "pd", vllm_router, settings))
        if haproxy:
            proxies[HAPROXY] = stack.enter_context(contenders.haproxy(scratch, haproxy, urls))
        direct_port = int(urls[0].rpartition(":")[2])
        found = []
        for number in range(rounds):
            found.append(_round(scratch, number, seconds, proxies, direct_port, say))
        return found


def _round(
    scratch: Path,
    number: int,
    seconds: float,
    proxies: dict[str, Running | None],
    direct_port: int,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for contest, how in CONTESTS.items():
        names = [name for name in proxies if _takes_part(name, contest)]
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            say(f"round {number + 1}: {contest}: {name}")
            running = proxies[name]
            port = running.port if running else direct_port
            process = running.process if running else None
            taken = load(
                port,
                how.data,
                scratch,
                connections=how.connections,
                seconds=seconds,
                warmup=how.warmup,
                rate=how.rate,
                proxy=process,
            )
            found.setdefault(contest, {})[name] = _row(taken, how.per)
    return found


def _takes_part(name: str, contest: str) -> bool:
    if name in (OURS_PD, VLLM_PD):
        return contest in PD_CONTESTS
    if name == OURS_ALL:
        return contest in ALL_CONTESTS
    return name != DIRECT or contest in DIRECT_CONTESTS


def _row(taken: Measured, per: str) -> dict[str, Any]:
    load = taken.load
    done = max(1, load[per])
    return {
        "cpu_us": taken.cpu_us / done,
        "per_second": load[per] / load["seconds"],
        "failed": load["failed"],
        "rss_mb": taken.rss_mb,
        **{name: load[name] for name in ("time_us", "first_byte_us", "delay_us")},
    }
