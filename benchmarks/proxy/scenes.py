"""The failures that `benchmarks/router.py` plays through, on the router's defaults; and the same beside vllm-router."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxy import contenders
from proxy.contenders import Running
from proxy.failures import (
    CHAT,
    Engine,
    aborts,
    cancel_between_ms,
    cancel_ms,
    hits_per_request,
    mock_engines,
    stalled_seconds,
)
from proxy.rounds import OURS, ROUND_ROBIN

Row = tuple[str, list[float], float | None]
REQUESTS = 100
LONG = {**CHAT, "max_tokens": 100_000}
PROMPT = {"messages": [{"role": "user", "content": "x" * 20_000}]}
"""Too long to be computed where it is decoded."""


def failure_rows(
    scratch: Path, count: int, programs: dict[str, str | None], say: Callable[[str], None]
) -> tuple[list[Row], dict[str, Any]]:
    """Limits (name, found, at most), and everything that was counted. `count`: clients that leave."""
    raw: dict[str, Any] = {}
    for name in (OURS, ROUND_ROBIN):
        program = programs.get("vllm-router")
        if name == ROUND_ROBIN and not program:
            continue
        found = raw[name] = {}
        for kind, how in (
            ("status", {"status": 503}),
            ("status", {"status": 500}),
            ("status", {"status": 400}),
            ("reset_before", {"first_only": True}),
        ):
            label = f"{kind} {how.get('status', 'by one of two')}"
            say(f"failures: {name}: {label}")
            with _stage(scratch, name, program) as (running, engines):
                found[label] = hits_per_request(running.port, engines, kind, REQUESTS, **how)
        with _stage(scratch, name, program, "--time-scale", "1") as (running, engines):
            say(f"failures: {name}: clients that leave")
            found["cancel"] = {
                phase: cancel_ms(running.port, body, _busy(engines), _idle(engines), 5)
                for phase, body in (
                    ("before the first token", {**LONG, **PROMPT}),
                    ("streaming", {**LONG, "stream": True}),
                    ("not streaming", LONG),
                )
            }
        if name == OURS:
            with _split_stage(scratch) as (running, engines):
                say(f"failures: {name}: clients that leave between prefill and decode")
                body = {**LONG, **PROMPT}
                found["cancel"]["between prefill and decode"] = cancel_between_ms(running.port, *engines, body, 5)
            with _stage(scratch, name, program, "--time-scale", "0.02") as (running, engines):
                found["aborts"] = aborts(running, engines, count)
            with _stage(scratch, name, program) as (running, engines):
                say(f"failures: {name}: a stream that stalls")
                found["stall"] = stalled_seconds(running.port, engines)
    return _limits(raw[OURS]), raw


def _limits(found: dict[str, Any]) -> list[Row]:
    cancelled = [max(found["cancel"][phase]) for phase in found["cancel"]]
    left, reset = found["aborts"], found["reset_before by one of two"]
    seconds, told = found["stall"]
    return [
        ("engines asked for a request while all say 503", [found["status 503"]["hits_per_request"]], 1.1),
        ("engines asked for a request that is a 400", [found["status 400"]["hits_per_request"]], 1.0),
        ("requests lost while one of two engines resets", [reset["requests"] - reset["served"]], 0.0),
        ("engines asked meanwhile", [reset["hits_per_request"]], 2.0),
        ("a client leaves until engines stop: ms, the slowest", cancelled, 50.0),
        ("of these, between prefill and decode: ms", found["cancel"]["between prefill and decode"], 50.0),
        (f"{left['aborts']:,} aborts: requests left in engines", [left["running"]], 0.0),
        (f"{left['aborts']:,} aborts: descriptors left", [left["more_files"]], 0.0),
        (f"{left['aborts']:,} aborts: connections to engines left", [left["engine_connections_left"]], 0.0),
        (f"{left['aborts']:,} aborts: memory, MB more", [left["more_rss_mb"]], 8.0),
        ("a stream stalls until its client is told: s", [seconds if told else float("inf")], 16.0),
    ]


@contextlib.contextmanager
def _stage(scratch: Path, name: str, program: str | None, *settings: str) -> Any:
    with mock_engines(scratch, "--time-scale", "0", *settings) as engines, contextlib.ExitStack() as stack:
        urls = [engine.url for engine in engines]
        running: Running
        if name == OURS:
            running = stack.enter_context(contenders.ours(scratch, "failing", ["--engines", ",".join(urls)]))
        else:
            asked = ["--worker-urls", *urls, "--policy", "round_robin"]
            running = stack.enter_context(contenders.vllm_router(scratch, "failing", program or "", asked))
        yield running, engines


@contextlib.contextmanager
def _split_stage(scratch: Path) -> Any:
    """One engine that prefills, one that decodes."""
    settings = ("--time-scale", "1", "--connector", "nixl", "--max-sequences", "1")
    with mock_engines(scratch, *settings) as engines:
        prefill, decode = (engine.url for engine in engines)
        with contenders.ours(scratch, "split", ["--prefill", prefill, "--decode", decode]) as running:
            yield running, engines


def _busy(engines: list[Engine]) -> Callable[[], bool]:
    return lambda: any(engine.state()["running"] for engine in engines)


def _idle(engines: list[Engine]) -> Callable[[], bool]:
    return lambda: not any(engine.state()["running"] for engine in engines)
