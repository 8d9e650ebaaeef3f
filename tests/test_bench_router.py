"""What `benchmarks/router.py` measures with, and what it calls met."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from proxy import report, scenes  # noqa: E402
from proxy.contenders import ours  # noqa: E402
from proxy.failures import aborts, cancel_between_ms, cancel_ms, hits_per_request, mock_engines, post  # noqa: E402
from proxy.large import _p99  # noqa: E402
from proxy.rounds import CHAT, CONTESTS, DIRECT, OURS, ROUND_ROBIN  # noqa: E402
from proxy.tools import PROXY_CORE, Process, engines, load, request  # noqa: E402


def test_engines_and_clients_in_c_count_what_there_was(tmp_path: Path) -> None:
    with engines(2, tmp_path) as urls:
        ports = [int(url.rpartition(":")[2]) for url in urls]
        taken = load(ports[0], request(CHAT), tmp_path, connections=4, seconds=0.3, warmup=0.1).load
        assert taken["requests"] > 0 and taken["failed"] == taken["events"] == 0
        assert 0 < taken["time_us"][0] <= taken["time_us"][2]
        paced = {**CHAT, "stream": True, "max_tokens": 1_000, "interval_us": 5_000}
        taken = load(ports[1], request(paced), tmp_path, connections=4, seconds=1.0, warmup=0.1).load
        assert taken["events"] / taken["seconds"] <= 4 / 0.005 * 1.5 and taken["delay_us"][0] >= 0
        short = {**CHAT, "stream": True, "max_tokens": 3}
        taken = load(ports[1], request(short), tmp_path, connections=1, seconds=0.3, warmup=0.0, rate=50).load
        assert abs(taken["events"] - 3 * taken["requests"]) <= 3
        with urllib.request.urlopen(f"{urls[0]}/mock/counts") as answer:
            assert json.loads(answer.read())["requests"] >= taken["requests"]


def test_the_router_is_measured_and_survives_failures(tmp_path: Path) -> None:
    with engines(2, tmp_path) as urls, ours(tmp_path, "ours", ["--engines", ",".join(urls)]) as running:
        contest = CONTESTS["request"]
        taken = load(
            running.port, contest.data, tmp_path, connections=4, seconds=0.5, warmup=0.1, proxy=running.process
        )
        assert taken.load["requests"] > 0 and taken.load["failed"] == 0
        assert 10 < taken.rss_mb < 500 and taken.cpu_us > 0
    with (
        mock_engines(tmp_path, "--time-scale", "0.05") as mocks,
        ours(tmp_path, "failing", ["--engines", ",".join(mock.url for mock in mocks)]) as running,
    ):
        found = hits_per_request(running.port, mocks, "status", 10, status=400)
        assert found == {"requests": 10, "served": 0, "hits_per_request": 1.0}
        times = cancel_ms(running.port, {**CHAT, "max_tokens": 5_000}, scenes._busy(mocks), scenes._idle(mocks), 1)
        assert len(times) == 1
        left = aborts(running, mocks, 30)
        assert (left["running"], left["served_after"]) == (0, 200) and left["more_files"] <= 0
        assert left["engine_connections_left"] == 0
        assert post(running.port, CHAT)[0] == 200


def test_what_a_client_leaves_between_prefill_and_decode_is_freed_and_does_not_expire(tmp_path: Path) -> None:
    with scenes._split_stage(tmp_path) as (running, (prefill, decode)):
        body = {**scenes.LONG, **scenes.PROMPT}
        assert len(cancel_between_ms(running.port, prefill, decode, body, 2)) == 2
        assert prefill.state()["leases"] == {"held": 0, "expired": 0}
        assert decode.state()["running"] <= 1


def test_open_files_tells_connections_to_some_ports_from_others(tmp_path: Path) -> None:
    program = "import signal, socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
    program += "print('there', flush=True); signal.pause()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = Process([sys.executable, "-c", program, str(port)], PROXY_CORE, tmp_path / "log")
        try:
            assert process.line() == "there"
            others, connections = process.open_files({port})
            assert connections == 1
            assert process.open_files({port + 1}) == (others + 1, 0)
        finally:
            process.stop()


def row(cpu_us: float, time_us: float = 100.0, rss_mb: float = 50.0) -> dict[str, Any]:
    times = {name: [time_us, time_us, 3 * time_us, 4 * time_us] for name in ("time_us", "first_byte_us", "delay_us")}
    return {"cpu_us": cpu_us, "per_second": 1.0, "failed": 0, "rss_mb": rss_mb, **times}


def results(ours_us: float) -> dict[str, Any]:
    rounds = [
        {
            "request": {OURS: row(ours_us * factor), ROUND_ROBIN: row(100.0 * factor)},
            "idle": {OURS: row(1.0, 500.0), DIRECT: row(0.0, 100.0), ROUND_ROBIN: row(1.0, 300.0)},
        }
        for factor in (1, 3, 2)
    ]
    machine = {"cpu": "x", "cores": 2, "python": "3.11"}
    return {
        "rounds": rounds,
        "machine": machine,
        "command": "c",
        "commit": "d",
        "date": "e",
        "absolute": [],
        "router_python": "3",
    }


@pytest.mark.parametrize(
    ("ours_us", "verdict"), [(120.0, "not met"), (100.0, "met, aim missed"), (90.0, "met, aim too")]
)
def test_ratios_are_of_one_round(ours_us: float, verdict: str) -> None:
    limits = {limit["name"]: limit for limit in report.judge(results(ours_us))}
    found = limits[f"CPU of a request: {OURS} / {ROUND_ROBIN}"]
    assert found["found"] == pytest.approx(ours_us / 100) and found["verdict"] == verdict
    assert limits["added to an idle engine's p99: µs"]["found"] == 1200.0
    assert limits["added to an idle engine's p99: µs"]["verdict"] == "not met"
    assert limits[f"memory, 400 streams: {OURS} / {ROUND_ROBIN}"]["verdict"] == "absent"


def test_the_page_names_what_others_do_better(tmp_path: Path) -> None:
    taken = results(120.0)
    assert any("request: " + ROUND_ROBIN in line and "1.20" in line for line in report.losses(taken["rounds"]))
    page = report.write(taken, tmp_path).read_text()
    assert f"| CPU of a request: {OURS} / {ROUND_ROBIN} | 1.20 [1.20–1.20] | 1.05 | 0.9 | not met |" in page
    assert json.loads((tmp_path / "router.json").read_text())["limits"]


def test_lag_is_the_bucket_that_holds_99_of_100() -> None:
    assert _p99({0.001: 5.0, 0.005: 5.0, 0.01: 5.0}, {0.001: 103.0, 0.005: 104.0, 0.01: 105.0}) == 0.005
    assert _p99({}, {}) == float("inf")
