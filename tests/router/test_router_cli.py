"""`deepinfer router` as a user meets it: what is wrong is one line and exit code 1, and what is right serves."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml
from router_process import RouterProcess

from deepinfer_router.config_source import checked
from mock_engines import mock_engines_in_thread

DEEPINFER = [sys.executable, "-m", "deepinfer_vllm.cli.main"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEEPINFER, "router", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "command line: engines: none: list some, name a source below `discovery`, or use --engines"),
        (["--engines", ""], "command line: engines: none: "),
        (["--engines", "ftp://a"], "command line: engines.0.url: 'ftp://a': must be http://HOST:PORT"),
        (["--prefill", "a:1"], "command line: engines: none has the role decode: "),
        (["--engines", "a:1", "--workers", "0"], "command line: process.workers: 0: "),
        (["--engines", "a:1", "--workers", "two"], "Invalid value for '--workers'"),
        (["--engines", "a:1", "--listen", "8080"], "command line: listen '8080' must be HOST:PORT"),
        (["--engines", "a:1", "--admin", "x"], "command line: admin.listen 'x' must be HOST:PORT"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["--config", "bad.yaml"], "bad.yaml: not YAML: "),
        (
            ["--config", "unknown.yaml"],
            "unknown.yaml: entry.encodin: there is no such setting: did you mean 'encoding'?",
        ),
        (["--config", "tls.yaml"], "http.tls: certificate nowhere.pem"),
        (["--config", "keys.yaml"], "API key 'k': environment variable NOT_SET_AT_ALL is empty"),
        (["--config", "recipe.yaml", "--check"], "recipe.yaml: entry.recipe.tokenizer: missing: "),
        (["--config", "costs.yaml", "--check"], "costs.yaml: prefill.costs_file: "),
        (["--config", "store.yaml", "--check"], "store.yaml: store.token_env: "),
        (["--config", "ca.yaml", "--check"], "ca.yaml: http.engine_tls.ca"),
        (["--config", "srv.yaml", "--listen", "nohost.invalid:1"], "--listen nohost.invalid:1: "),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    files = {
        "bad.yaml": "engines: [",
        "unknown.yaml": "engines: [a:1]\nentry: {encodin: recipe}",
        "tls.yaml": "engines: [a:1]\nhttp: {tls: {certificate: nowhere.pem}}",
        "keys.yaml": "engines: [a:1]\nidentity: {keys: [{name: k, env: NOT_SET_AT_ALL}]}",
        "recipe.yaml": "engines: [a:1]\nentry: {encoding: recipe}",
        "costs.yaml": "engines: [a:1]\nprefill: {costs_file: nowhere.json}",
        "store.yaml": "engines: [a:1]\nstore: {address: 'a:1', token_env: NOT_SET_AT_ALL}",
        "ca.yaml": "engines: [a:1]\nhttp: {engine_tls: {ca: nowhere.pem}}",
        "srv.yaml": "engines: [a:1]",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    *before, last = done.stderr.splitlines()
    assert all(said.startswith("deepinfer: router: 1 engines") for said in before)
    assert last.startswith("deepinfer: ") and line in last


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--engines", "a:1", "--listen", listen, "--admin", "", cwd=tmp_path)
    assert done.returncode == 1
    remedy = "stop what has it, or choose another port"
    assert done.stderr.splitlines()[-1] == f"deepinfer: router: --listen {listen}: Address already in use: {remedy}"


def test_print_config_says_everything_and_is_a_configuration(tmp_path: Path) -> None:
    """vllm-project/router#46: what a flag has selected can be seen before it serves."""
    (tmp_path / "router.yaml").write_text("process: {workers: 2}\nadmin: {token: 'a secret of sixteen'}")
    done = run("--config", "router.yaml", "--prefill", "p:1", "--decode", "d:1,d:2", "--print-config", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a secret" not in done.stdout
    printed = yaml.safe_load(done.stdout)
    assert [(engine["url"], engine["roles"]) for engine in printed["engines"]] == [
        ("http://p:1", ["prefill"]),
        ("http://d:1", ["decode"]),
        ("http://d:2", ["decode"]),
    ]
    assert printed["process"]["workers"] == 2
    assert printed["prefill"]["edges_tokens"] == [16384, 65536, 262144]
    del printed["admin"]["token"]
    assert checked(printed, "printed").plain_engines()[0]["id"] == "p:1"


@pytest.mark.parametrize(
    ("arguments", "summary"),
    [
        (["--engines", "a:1"], "1 engines (1 prefill, 1 decode); each request on one engine; "),
        (
            ["--prefill", "a:1", "--decode", "b:1,c:1", "--encode", "e:1"],
            "4 engines (1 prefill, 2 decode, 1 encode); prefill and decode apart; ",
        ),
    ],
)
def test_check_says_which_mode_it_is(arguments: list[str], summary: str, tmp_path: Path) -> None:
    """vllm-project/router#46: a mode is never selected silently."""
    done = run(*arguments, "--check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"deepinfer: router: {summary}no API keys; encoding by engine\n"


def test_check_says_what_is_not_known_yet(tmp_path: Path) -> None:
    (tmp_path / "found.yaml").write_text("discovery: {file: {path: engines.yaml}}")
    done = run("--config", "found.yaml", "--check", cwd=tmp_path)
    assert done.stdout.startswith("deepinfer: router: 0 engines (none listed), discovery by file; each request on one")
    assert "or apart where engines of one role are found; no API keys" in done.stdout


@pytest.mark.parametrize("store", [False, True])
def test_with_nothing_but_engines_it_serves(tmp_path: Path, store: bool) -> None:
    """With a store that nobody serves, too: ai-dynamo/dynamo#10580, readiness does not wait for what is only faster."""
    (tmp_path / "router.yaml").write_text(json.dumps({"store": {"socket": str(tmp_path / "nobody")}} if store else {}))
    with mock_engines_in_thread(2) as engines:
        arguments = ["--engines", ",".join(engine.url for engine in engines), "--listen", "127.0.0.1:0"]
        arguments += ["--config", "router.yaml"] if store else []
        with RouterProcess([*DEEPINFER, "router", *arguments, "--admin", "127.0.0.1:0"], tmp_path) as router:
            body = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            request = Request(
                f"http://127.0.0.1:{router.port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urlopen(request, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 4
            assert router.get("/ready", admin=True) == (200, "ready\n")
            rows = router.get("/engines", admin=True)[1]
            assert {row["url"]: row["state"] for row in rows} == {engine.url: "ready" for engine in engines}
            router.signal(signal.SIGTERM)
            assert router.ended() == 0
