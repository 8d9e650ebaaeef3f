"""The status page in a real browser, in front of real workers, and the figures that it shows."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from router_process import RouterProcess, until

import deepinfer_router
from deepinfer_router.config_source import ConfigSource
from deepinfer_router.engine_gauges import EngineGauges
from deepinfer_router.exposition import expose
from deepinfer_router.metrics import TOKENS, Registry
from deepinfer_router.startup import prepare
from deepinfer_router.status_view import status_view

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = Path(deepinfer_router.__path__[0], "status_page.html").read_text()
EVIL = "<img src=x onerror=document.title='taken'>"


def page(url: str, tmp_path: Path) -> tuple[str, str]:
    """What is there after some polls, and what the browser complained of."""
    assert BROWSER
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    arguments += ["--enable-logging=stderr", "--virtual-time-budget=7000", "--dump-dom", url]
    done = subprocess.run([BROWSER, *arguments], capture_output=True, text=True, timeout=180)
    return done.stdout, "".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome here")
def test_a_browser_shows_what_there_is(tmp_path: Path) -> None:
    engines = [{"url": "http://127.0.0.1:1", "id": EVIL, "ranks": 2, "capacity_tokens": 1000}, "http://127.0.0.1:2"]
    (tmp_path / "router.yaml").write_text(json.dumps({"engines": engines}))
    over = {"listen": "127.0.0.1:0", "admin.listen": "127.0.0.1:0", "process.workers": 2}
    boot = prepare(ConfigSource(tmp_path / "router.yaml", over))[1]
    with RouterProcess.supervisor(boot, tmp_path) as router:
        router.said("workers: 2")
        until(lambda: router.get("/ready", admin=True)[0] == 200)
        assert router.get("/engines/127.0.0.1:2/drain", admin=True, method="POST")[0] == 200
        until(lambda: "draining" in json.dumps(router.get("/engines", admin=True)[1]))
        content, complaints = page(f"http://127.0.0.1:{router.admin_port}/", tmp_path)
    assert complaints == ""
    assert "<title>deepinfer router</title>" in content
    assert '<span id="state" class="chip good" role="status">ready</span>' in content
    text = html.unescape(re.sub(r"<script>.*?</script>|<[^>]+>", " ", content, flags=re.DOTALL))
    assert f"{EVIL} · rank 0" in text and "rank 1" in text
    assert "127.0.0.1:2" in text and "draining" in text
    assert text.count("serving") == 2
    assert "1 of 2 engines open" in text
    assert 'role="meter" aria-label="KV tokens of ' in content


def test_the_page_needs_nothing_from_elsewhere() -> None:
    assert re.findall(r"(?:src|href)=\"(?!data:|metrics|status|autoscale)[^\"]*\"|https?://", PAGE) == []
    assert "default-src 'none'" in PAGE
    assert "innerHTML" not in PAGE


def report(waiting: int, demand: float) -> dict[str, Any]:
    group = {"models": [], "group": "<16K", "engines": ["a"], "demand": demand}
    status = {"queues": {"blue": [waiting, 2.5]}, "prefill": {"groups": [group], "costs": {"sets": {}}}}
    return {"worker": 0, "pid": 7, "ready": True, "silent_s": 0.0, "engines": [], "status": status}


def test_the_figures_of_workers_are_added() -> None:
    registry = Registry()
    requests = registry.counter("requests", "Requests.", "api", "status")
    requests.labels("chat", "200").inc(8)
    requests.labels("chat", "503").inc(2)
    first = registry.histogram("first_token_seconds", "First token.", "api", buckets=TOKENS)
    first.labels("chat").observe(100)
    first.labels("completion").observe(100)
    for name, tokens in (("tenant_prompt_tokens", 100), ("tenant_hit_tokens", 25)):
        registry.counter(name, "Tokens.", "tenant").labels("green").inc(tokens)
    starting = {"worker": 1, "pid": 8, "ready": False, "silent_s": 0.0}
    view = status_view([starting, report(1, 0.5), report(2, 0.25)], registry.snapshot())
    assert view["queues"] == [{"tenant": "blue", "waiting": 3, "seconds": 5.0}]
    assert view["costs"] == {"sets": {}}
    assert view["groups"] == [{"models": [], "group": "<16K", "engines": ["a"], "demand": 0.75}]
    assert view["tenants"] == [
        {"tenant": "blue", "waiting": 3, "seconds": 5.0, "prompt_tokens": 0, "hit_tokens": 0},
        {"tenant": "green", "waiting": 0, "seconds": 0.0, "prompt_tokens": 100, "hit_tokens": 25},
    ]
    totals = view["totals"]
    assert (totals["requests"], totals["failed"], totals["prompt_tokens"], totals["hit_tokens"]) == (10, 2, 100, 25)
    assert totals["first_token"]["counts"][2] == 2 and len(totals["first_token"]["counts"]) == len(TOKENS) + 1
    assert [worker["pid"] for worker in view["workers"]] == [7, 7, 8]


def test_before_the_first_report_there_is_a_status() -> None:
    view = status_view([], [])
    assert view["engines"] == view["groups"] == view["tenants"] == []
    assert view["totals"]["requests"] == 0


def test_engines_are_metrics_while_they_are_there() -> None:
    registry = Registry()
    gauges = EngineGauges(registry)
    rank = {"rank": 0, "active": 3, "kv_tokens": 70, "pending_seconds": 1.5, "capacity_tokens": None}
    gauges.show([{"id": "a", "state": "ready", "ranks": [rank]}, {"id": "b", "state": "open", "ranks": []}])
    gauges.show([{"id": "a", "state": "suspect", "ranks": [{**rank, "active": 2}]}])
    assert sorted(line for line in expose(registry.snapshot()).decode().splitlines() if line[0] != "#") == [
        'deepinfer_router_engine_active_requests{engine="a",rank="0"} 2',
        'deepinfer_router_engine_kv_tokens{engine="a",rank="0"} 70',
        'deepinfer_router_engine_pending_prefill_seconds{engine="a",rank="0"} 1.5',
        'deepinfer_router_engine_state{engine="a",state="suspect"} 1.0',
    ]
