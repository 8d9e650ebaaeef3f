"""The supervisor with real worker processes: death, draining, reloading, and what monitors are told."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from router_process import RouterProcess, until

from deepinfer_router.boot import Boot
from deepinfer_router.config_source import ConfigSource
from deepinfer_router.startup import prepare

ENGINES = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def boot(tmp_path: Path, **over: Any) -> Boot:
    """A boot with a file to change, and free ports."""
    path = tmp_path / "router.yaml"
    path.write_text(json.dumps({"engines": ENGINES}))
    source = ConfigSource(path, {"listen": "127.0.0.1:0", "admin.listen": "127.0.0.1:0", **over})
    return prepare(source)[1]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RouterProcess]:
    """Two workers."""
    with RouterProcess.supervisor(boot(tmp_path, **{"process.workers": 2}), tmp_path) as router:
        router.said("workers: 2")
        yield router


def worker_pids(router: RouterProcess) -> set[int]:
    return {worker["pid"] for worker in router.get("/status", admin=True)[1]["workers"] if worker["ready"]}


def requests_of(router: RouterProcess) -> dict[int, int]:
    """By process, how many it has."""
    return {worker["pid"]: worker["requests"] or 0 for worker in router.get("/status", admin=True)[1]["workers"]}


def under_way(router: RouterProcess) -> int:
    return sum(requests_of(router).values())


def states(router: RouterProcess, engine: str) -> Any:
    return {row["id"]: row["states"] for row in router.get("/engines", admin=True)[1]}.get(engine)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def counted(router: RouterProcess, name: str) -> float:
    text = router.get("/metrics", admin=True)[1]
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"deepinfer_router_{name}"
    )


def test_all_workers_serve_the_port(pair: RouterProcess) -> None:
    seen = until(lambda: len(pids := {pair.get("/pid")[1] for _ in range(30)}) == 2 and pids)
    assert seen == worker_pids(pair)


def test_workers_follow_the_first_in_who_serves_what(pair: RouterProcess) -> None:
    followed = until(lambda: (found := {tuple(pair.get("/followed")[1]) for _ in range(30)} - {()}) and found)
    workers = pair.get("/status", admin=True)[1]["workers"]
    first = min(workers, key=lambda worker: worker["worker"])
    assert followed == {(first["pid"],)}


def test_a_killed_worker_loses_only_what_it_had_and_is_replaced(pair: RouterProcess, tmp_path: Path) -> None:
    before = worker_pids(pair)
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(pair.get, "/slow") for _ in range(11)]
        had = until(lambda: sum((found := requests_of(pair)).values()) == 11 and found)
        with pytest.raises(OSError):
            pair.get("/kill")
        (tmp_path / "go").touch()
        lost, served = 0, set()
        for answer in answers:
            try:
                served.add(answer.result()[1])
            except OSError:
                lost += 1
    pair.said("ended: signal 9; it is started again")
    until(lambda: len(worker_pids(pair)) == 2)
    (killed,) = before - worker_pids(pair)
    assert lost == had[killed] and served <= before - {killed}
    assert counted(pair, "worker_restarts_total") == 1


def test_what_a_dead_worker_counted_stays_counted(tmp_path: Path) -> None:
    with RouterProcess.supervisor(boot(tmp_path), tmp_path) as router:
        for _ in range(5):
            assert router.get("/pid")[0] == 200
        assert counted(router, "bare_answers_total") == 5
        (pid,) = worker_pids(router)
        os.kill(pid, signal.SIGKILL)
        until(lambda: worker_pids(router) - {pid})
        assert router.get("/pid")[0] == 200
        assert counted(router, "bare_answers_total") == 6


def test_sigterm_finishes_what_there_is(pair: RouterProcess, tmp_path: Path) -> None:
    pids = worker_pids(pair)
    port = pair.port
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(pair.get, "/slow") for _ in range(8)]
        until(lambda: under_way(pair) == 8)
        pair.signal(signal.SIGTERM)
        until(lambda: pair.get("/ready", admin=True) == (503, "draining\n"))
        assert pair.get("/health", admin=True) == (200, "ok\n")
        (tmp_path / "go").touch()
        assert {answer.result()[1] for answer in answers} <= pids
    assert pair.ended() == 0
    assert not any(map(alive, pids))
    pair.said("ends: what is under way has 30 s; a second signal ends it at once")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_grace_has_an_end(tmp_path: Path) -> None:
    with RouterProcess.supervisor(boot(tmp_path, **{"process.drain_s": 0.1}), tmp_path) as router:
        connection = HTTPConnection("127.0.0.1", router.port)
        connection.request("GET", "/slow")
        until(lambda: under_way(router) == 1)
        router.signal(signal.SIGTERM)
        assert router.ended() == 0
        assert connection.getresponse().status == 503
        connection.close()


def test_a_second_sigterm_does_not_wait(pair: RouterProcess) -> None:
    connection = HTTPConnection("127.0.0.1", pair.port)
    connection.request("GET", "/spin")  # its worker will never hear of the first
    router_pids = worker_pids(pair)
    pair.signal(signal.SIGTERM)
    until(lambda: pair.get("/ready", admin=True) == (503, "draining\n"))
    pair.signal(signal.SIGTERM)
    assert pair.ended() == 0
    assert not any(map(alive, router_pids))
    connection.close()


def test_a_stuck_loop_fails_neither_health_nor_metrics_and_is_replaced(tmp_path: Path) -> None:
    """vllm-project/production-stack#431: liveness must not starve behind requests."""
    with RouterProcess.supervisor(boot(tmp_path, **{"process.hung_s": 6.0}), tmp_path) as router:
        (pid,) = until(lambda: worker_pids(router))
        connection = HTTPConnection("127.0.0.1", router.port)
        connection.request("GET", "/spin")
        assert router.get("/health", admin=True) == (200, "ok\n")
        assert counted(router, "workers") == 1
        router.said(f"(pid {pid}) has not answered for 6 s: killed")
        until(lambda: worker_pids(router) - {pid})
        assert counted(router, "worker_hung_total") == 1
        connection.close()


def test_workers_end_with_their_supervisor(pair: RouterProcess) -> None:
    pids = until(lambda: len(found := worker_pids(pair)) == 2 and found)
    pair.signal(signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))


def test_engines_are_drained_and_undrained_in_every_worker(pair: RouterProcess) -> None:
    assert pair.get("/engines/127.0.0.1:1/drain", admin=True, method="POST") == (
        200,
        {"engine": "127.0.0.1:1", "drained": True},
    )
    until(lambda: states(pair, "127.0.0.1:1") == {"draining": 2})
    for pid in worker_pids(pair):
        os.kill(pid, signal.SIGKILL)  # those that come after know it too
    until(lambda: states(pair, "127.0.0.1:1") == {"draining": 2})
    assert pair.get("/engines/127.0.0.1:1/undrain", admin=True, method="POST")[0] == 200
    until(lambda: states(pair, "127.0.0.1:1") == {"ready": 2})


def test_sighup_takes_up_engines_and_keys(pair: RouterProcess, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        json.dumps(
            {
                "engines": [ENGINES[0], "http://127.0.0.1:3"],
                "identity": {"everybody": {"tenant": "new"}},
                "entry": {"image_tokens": 7},
            }
        )
    )
    pair.signal(signal.SIGHUP)
    pair.said("reloaded; these need a restart: entry")
    until(lambda: {pair.get("/tenant")[1] for _ in range(8)} == {"new"})
    until(lambda: pair.get("/engines")[1] == {"127.0.0.1:1": "ready", "127.0.0.1:3": "ready"})
    assert counted(pair, "reloads_total") >= 1


def test_a_broken_file_changes_nothing(pair: RouterProcess, tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text("engines: [1")
    pair.signal(signal.SIGHUP)
    pair.said("not reloaded: ")
    (tmp_path / "router.yaml").unlink()
    pair.signal(signal.SIGHUP)
    pair.said("No such file or directory")
    for pid in worker_pids(pair):
        os.kill(pid, signal.SIGKILL)  # those that come after start with what last was right
    pair.said("ended: signal 9", times=2)
    until(lambda: len(worker_pids(pair)) == 2)
    assert pair.get("/engines")[1] == {"127.0.0.1:1": "ready", "127.0.0.1:2": "ready"}


def test_a_changed_file_is_taken_up_by_itself(pair: RouterProcess, tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(json.dumps({"engines": ["http://127.0.0.1:9"]}))
    until(lambda: pair.get("/engines")[1] == {"127.0.0.1:9": "ready"})


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """With SO_REUSEPORT the kernel would let a second router share the port, and half of its requests."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    with taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for over, option in (({"listen": listen}, "--listen"), ({"admin.listen": listen}, "--admin")):
            with RouterProcess.supervisor(boot(tmp_path, **over), tmp_path) as router:
                assert router.ended() == 1
                assert f"deepinfer: router: {option} {listen}: Address already in use: " in router.said("in use")
                assert len(router.lines) == 1


def test_a_worker_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    over = {"identity.everybody": {"tenant": "cannot start"}}
    with RouterProcess.supervisor(boot(tmp_path, **over), tmp_path) as router:
        assert router.ended() == 1
        router.said("Address already in use")


def test_workers_that_never_serve_are_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "pass"]
    with RouterProcess.supervisor(boot(tmp_path), tmp_path, command) as router:
        router.said("ended: exit code 0; it is started again")
        assert router.get("/ready", admin=True) == (503, "no worker serves yet\n")
        assert router.ended() == 1
        assert router.said("given up") == "deepinfer: router: worker 0 has ended 6 times before it served: given up"


def test_readiness_wants_an_engine_and_a_worker(tmp_path: Path) -> None:
    discovery = {"file": {"path": str(tmp_path / "engines.yaml"), "poll_s": 0.05}}
    with RouterProcess.supervisor(boot(tmp_path, engines=[], discovery=discovery), tmp_path) as router:
        until(lambda: router.get("/ready", admin=True) == (503, "no engine\n"))
        until(lambda: counted(router, "discovery_errors_total") == 1)
        (tmp_path / "engines.yaml").write_text("[http://127.0.0.1:5]")
        until(lambda: router.get("/ready", admin=True) == (200, "ready\n"))
        assert counted(router, "discovery_engines") == 1


def certificate(directory: Path, name: str) -> None:
    """A new one in the files that the router reads."""
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    files = ["-keyout", "new.key", "-out", "new.pem"]
    subprocess.run(["openssl", "req", "-x509", *new, *files], cwd=directory, check=True, capture_output=True)
    for kind in ("key", "pem"):
        os.replace(directory / f"new.{kind}", directory / f"server.{kind}")


def shown(port: int) -> bytes:
    """The certificate that a client is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plain, context.wrap_socket(plain) as client:
        return client.getpeercert(binary_form=True) or b""


def test_sighup_takes_up_a_new_certificate(tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    tls = {"certificate": str(tmp_path / "server.pem"), "key": str(tmp_path / "server.key")}
    with RouterProcess.supervisor(boot(tmp_path, **{"http.tls": tls}), tmp_path) as router:
        first = until(lambda: shown(router.port))
        certificate(tmp_path, "two")
        router.signal(signal.SIGHUP)
        second = until(lambda: (found := shown(router.port)) != first and found)
        (tmp_path / "server.pem").write_text("torn")
        router.signal(signal.SIGHUP)
        router.said("worker 0: http.tls: certificate ")
        assert shown(router.port) == second
