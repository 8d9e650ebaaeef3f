"""`deepinfer kvstore`: started, stopped, killed, started wrongly."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from check_case import UNIT, daemon, eventually, keys_of, namespace, store_prompt, storing
from deepinfer_kvstore.client import CheckClient
from deepinfer_kvstore.daemon import Address
from deepinfer_kvstore.descriptor import Group
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.metrics import MAX_TENANTS, Metrics
from deepinfer_kvstore.namespaces import Namespaces
from deepinfer_kvstore.questions import Question
from deepinfer_kvstore.snapshot_directory import Holder
from deepinfer_kvstore.snapshot_peers import SnapshotPeers
from deepinfer_kvstore.snapshots import DIGEST_BYTES, SNAPSHOT_KEY_BYTES
from deepinfer_kvstore.socket_claim import socket_path
from deepinfer_vllm.cli.main import run

TOKENS = list(range(4 * UNIT))
NAME = namespace().directory


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a short name: a socket's path may not be long."""
    with tempfile.TemporaryDirectory(prefix="kv-") as cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        yield


@contextmanager
def started(tmp_path: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    (tmp_path / "root").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "deepinfer_vllm.cli.main", "kvstore", "--root", str(tmp_path / "root"), *arguments]
    # Another test may have loaded vLLM, which has its children load torch's OpenMP.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return process.stdout.readline()


def asks(tmp_path: Path) -> int:
    asking = CheckClient(socket_path(tmp_path / "root"), budget_seconds=20)
    try:
        return asking.check(Question(NAME, TOKENS)).hit_tokens
    finally:
        asking.close()


def test_found_without_configuration_and_stopped_cleanly(tmp_path: Path) -> None:
    with storing(tmp_path, index_dir=None) as store, started(tmp_path, "--metrics", "127.0.0.1:0") as process:
        assert first_line(process) == f"kvstore: serving {tmp_path}/root (check, index, gc): 1 namespaces\n"
        store_prompt(store, TOKENS)
        eventually(lambda: asks(tmp_path) == 4 * UNIT)
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=20)
        assert (process.returncode, out, errors) == (0, "", "")
        assert not socket_path(tmp_path / "root").exists()


def test_killed_and_started_again(tmp_path: Path) -> None:
    """# Mooncake#935: the master was killed. Nothing depends on the daemon, and the next one finds its place free."""
    with storing(tmp_path, index_dir=None) as store:
        store_prompt(store, TOKENS)
        for _ in range(2):
            with started(tmp_path) as process:
                first_line(process)
                assert asks(tmp_path) == 4 * UNIT
                process.kill()
                process.wait()
                assert socket_path(tmp_path / "root").is_socket()
                assert asks(tmp_path) == 0


def test_a_second_daemon_says_so_in_one_line(tmp_path: Path) -> None:
    with started(tmp_path) as first:
        first_line(first)
        with started(tmp_path) as second:
            out, errors = second.communicate(timeout=60)
        assert second.returncode == 1 and out == ""
        path = socket_path(tmp_path / "root")
        assert (
            errors
            == f"deepinfer: kvstore: a daemon serves {path} already: stop it, or name another socket (--socket)\n"
        )
        with started(tmp_path, "--socket", str(tmp_path / "other.sock")) as third:
            assert first_line(third).startswith("kvstore: serving")


def test_namespaces_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_kvstore.daemon.SCAN_SECONDS", 0.02)
    asking = CheckClient(tmp_path / "check.sock", budget_seconds=20)
    with daemon(tmp_path) as running:
        for seed in ("a", "b"):
            what = namespace(model=seed)
            with storing(tmp_path, what) as store:
                store_prompt(store, TOKENS)
            eventually(lambda what=what: asking.check(Question(what.directory, TOKENS)).hit_tokens == 4 * UNIT)
        (tmp_path / "root" / ("0" * 16)).mkdir()
        (tmp_path / "root" / ("0" * 16) / "meta.json").write_text("{}")
        (tmp_path / "root" / "notes.txt").write_text("")
        gone = namespace(model="a").directory
        (tmp_path / "root" / gone).rename(tmp_path / "elsewhere")
        eventually(lambda: asking.check(Question(gone, TOKENS)).reason == "namespace")
        assert [found.name for found in running.namespaces.all()] == [namespace(model="b").directory]
        assert asking.check(Question("b", TOKENS)).hit_tokens == 4 * UNIT
    asking.close()


def test_inside_another_process_a_wrong_start_is_an_error_and_nothing_stays(tmp_path: Path) -> None:
    with daemon(tmp_path) as first:
        with pytest.raises(StoreConfigError, match="serves .* already"), daemon(tmp_path):
            pass
        assert first.options.socket and first.options.socket.is_socket()
    with daemon(tmp_path):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("kvstore-daemon", "check"))]


def test_a_namespace_is_closed_while_others_use_it(tmp_path: Path) -> None:
    with storing(tmp_path) as store:
        store_prompt(store, TOKENS)
        keys = keys_of(TOKENS)
        for _ in range(20):
            namespaces = Namespaces(tmp_path / "root", tmp_path / "index")
            namespaces.scan()
            (found,) = namespaces.all()
            stop = threading.Event()

            def use(work: Callable[[], object], stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    work()

            works = [found.sync, lambda found=found: found.pin(keys, 1), lambda found=found: found.index.get_many(keys)]
            threads = [threading.Thread(target=use, args=(work,)) for work in works]
            for thread in threads:
                thread.start()
            namespaces.close()
            stop.set()
            for thread in threads:
                thread.join()
        assert all(store.contains(keys))


def test_tenants_in_metrics_are_bounded() -> None:
    metrics = Metrics()
    for number in range(2 * MAX_TENANTS):
        metrics.count_tokens(str(number), 10, 5)
    tokens = "deepinfer_kvstore_asked_tokens_total"
    assert metrics.registry.get_sample_value(tokens, {"tenant": "0"}) == 10
    assert metrics.registry.get_sample_value(tokens, {"tenant": "other"}) == 10 * MAX_TENANTS


def test_hosts_the_directory_of_snapshots(tmp_path: Path) -> None:
    address = Address("127.0.0.1", 0, "a token long enough", None)
    key, holder = bytes(range(SNAPSHOT_KEY_BYTES)), Holder("127.0.0.1:1", 5, b"d" * DIGEST_BYTES, 60.0)
    with daemon(tmp_path, roles=("swa",), swa_listen=address, metrics=("127.0.0.1", 0)) as running:
        peers, directory = SnapshotPeers(address.token, timeout_seconds=20), f"127.0.0.1:{running.swa_port}"
        assert peers.announce(directory, key, holder)
        found = peers.locate(directory, [key])
        assert found is not None and found[1].address == holder.address
        assert running.metrics.registry.get_sample_value("deepinfer_kvstore_snapshots") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"hash_tokens": 0},
        {"hash_tokens": "16"},
        {"none_hash": 5},
        {"none_hash": "xyz"},
        {"none_hash": "00"},
        {"groups": ()},
        {"groups": (Group(1, 7, 10),)},
        {"groups": (Group(1, 16, 10, window_tokens=0),)},
        {"groups": (Group(1 << 16, 16, 10),)},
    ],
)
def test_a_namespace_that_makes_no_sense_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    odd = replace(namespace(), **changes)
    directory = tmp_path / "root" / odd.directory
    directory.mkdir(parents=True)
    (directory / "meta.json").write_text(odd.to_json())
    with storing(tmp_path) as store, daemon(tmp_path) as running:
        store_prompt(store, TOKENS)
        assert [found.name for found in running.namespaces.all()] == [NAME]


def test_metrics_are_scraped(tmp_path: Path) -> None:
    with storing(tmp_path) as store, daemon(tmp_path, metrics=("127.0.0.1", 0)) as running:
        store_prompt(store, TOKENS)
        asking = CheckClient(tmp_path / "check.sock", budget_seconds=20)
        asking.check(Question(NAME, TOKENS, ticket_seconds=60, conversation="c"))
        asking.check(Question(NAME, TOKENS[::-1], tenant="t"))
        asking.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{running.metrics_port}/metrics") as answer:
            values = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    prefix = "deepinfer_kvstore_"
    label = f'{{namespace="{NAME}"}}'
    assert values[prefix + 'checks_total{result="hit"}'] == values[prefix + 'checks_total{result="miss"}'] == "1.0"
    for tenant, hit in (("", "64.0"), ("t", "0.0")):
        assert values[prefix + f'asked_tokens_total{{tenant="{tenant}"}}'] == "64.0"
        assert values[prefix + f'hit_tokens_total{{tenant="{tenant}"}}'] == hit
    assert values[prefix + "check_seconds_count"] == "2.0"
    assert values[prefix + "keys" + label] == "4.0" and values[prefix + "used_bytes" + label] == "16384.0"
    assert values[prefix + "capacity_bytes" + label] == f"{store.options.capacity_bytes / 1e6}e+06"
    assert 0 <= float(values[prefix + "journal_lag_seconds" + label]) < 20
    assert values[prefix + "tickets"] == "1.0" and values[prefix + "conversation_bytes"] == str(4 * 32.0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "--root is missing"),
        (["--root", "/no/such"], "root /no/such is not a directory"),
        (["--root", "ROOT", "--roles", "check,cook"], "--roles 'cook' is unknown: there are check, index, gc, swa"),
        (["--root", "ROOT", "--roles", ","], "--roles is empty"),
        (["--root", "ROOT", "--metrics", "9400"], "must be HOST:PORT"),
        (["--root", "ROOT", "--metrics", "no.such.host.invalid:1"], "metrics cannot be served"),
        (["--root", "ROOT", "--listen", "127.0.0.1:0"], "--listen needs --token-file"),
        (
            ["--root", "ROOT", "--listen", "127.0.0.1:0", "--token-file", "TOKEN"],
            "--tls-cert and --tls-key, or --insecure",
        ),
        (
            ["--root", "ROOT", "--listen", "127.0.0.1:0", "--token-file", "/no/such", "--insecure"],
            "--token-file /no/such",
        ),
        (["--root", "ROOT", "--listen", "127.0.0.1:0", "--token-file", "SHORT", "--insecure"], "shorter than 16 bytes"),
        (["--root", "ROOT", "--listen", "127.0.0.1:0", "--token-file", "TOKEN", "--tls-cert", "TOKEN"], "go together"),
        (
            [
                "--root",
                "ROOT",
                "--listen",
                "127.0.0.1:0",
                "--token-file",
                "TOKEN",
                "--tls-cert",
                "TOKEN",
                "--tls-key",
                "TOKEN",
            ],
            "--tls-cert",
        ),
        (
            ["--root", "ROOT", "--listen", "300.0.0.1:0", "--token-file", "TOKEN", "--insecure"],
            "cannot listen on 300.0.0.1:0",
        ),
        (["--root", "ROOT", "--insecure"], "go with --listen or --swa-listen"),
        (["--root", "ROOT", "--roles", "swa"], "role swa without an address"),
        (["--root", "ROOT", "--roles", "swa", "--swa-listen", "127.0.0.1:0"], "--swa-listen needs --token-file"),
        (["--root", "ROOT", "--socket", "/" + "x" * 200], "more than 107 bytes"),
        (["--root", "ROOT", "--socket", "TOKEN"], "is there and no socket"),
        (["--root", "ROOT", "--socket", "/proc/x.sock"], "socket /proc/x.sock"),
        (["--root", "ROOT", "no-such-command"], "No such command"),
    ],
)
def test_wrong_starts_end_with_one_line(
    arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("a token long enough\n")
    (tmp_path / "short").write_text("short\n")
    (tmp_path / "root").mkdir()
    places = {"ROOT": tmp_path / "root", "TOKEN": tmp_path / "token", "SHORT": tmp_path / "short"}
    assert run(["kvstore", *(str(places.get(argument, argument)) for argument in arguments)]) != 0
    out, errors = capsys.readouterr()
    assert error in errors and errors.count("\n") == 1 and out == ""


def test_an_index_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_kvstore.network_fs.file_system_type", lambda *_: "nfs4")
    with pytest.raises(StoreConfigError, match="network file system"), daemon(tmp_path):
        pass


def test_is_light(tmp_path: Path) -> None:
    """No vLLM, no torch, no numpy: the node's memory is the engines'."""
    with started(tmp_path) as process:
        first_line(process)
        status = Path(f"/proc/{process.pid}/status").read_text()
        anonymous = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        assert anonymous < 60 * 1024
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps and "numpy" not in maps
