"""What is configured, and the one line that says what is wrong with it."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

from deepinfer_router.config import RouterConfig
from deepinfer_router.config_source import MAX_FILE_BYTES, ConfigSource, checked
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.roles import Role
from deepinfer_router.startup import prepare

ENGINE = "http://10.0.0.1:8000"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str) -> str:
    """The line that a file with `text` is refused with, without its name."""
    path = written(tmp_path, text)
    with pytest.raises(RouterConfigError) as refused:
        prepare(ConfigSource(path))[0]
    line = str(refused.value)
    assert "\n" not in line and line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


def test_engines_are_all_that_it_needs() -> None:
    config = prepare(ConfigSource(over={"engines": [ENGINE, "10.0.0.2:8000"]}))[0]
    assert [engine.url for engine in config.engines] == [ENGINE, "http://10.0.0.2:8000"]
    assert [engine.name for engine in config.engines] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert config.engines[0].roles == (Role.PREFILL, Role.DECODE)
    assert config == RouterConfig(engines=config.engines)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
listen: 0.0.0.0:80
engines:
- {ENGINE}
- {{url: "https://e:1/", id: second, roles: [decode], ranks: 4, capacity_tokens: 1000, models: [a]}}
process: {{workers: 3}}
""",
    )
    config = prepare(ConfigSource(path))[0]
    assert (config.listen, config.process.workers) == ("0.0.0.0:80", 3)
    second = config.engines[1]
    assert (second.url, second.name, second.roles) == ("https://e:1", "second", (Role.DECODE,))
    assert (second.ranks, second.capacity_tokens, second.models) == (4, 1000, ("a",))


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, f"engines: [{ENGINE}]\nprocess: {{workers: 3, drain_s: 1}}")
    over = {"engines": ["e:1"], "process.workers": 2, "admin.listen": ""}
    config = prepare(ConfigSource(path, over))[0]
    assert [engine.url for engine in config.engines] == ["http://e:1"]
    assert (config.process.workers, config.process.drain_s, config.admin.listen) == (2, 1, "")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "engines: [a:1]\nproces: {}",
            "proces: there is no such setting: did you mean 'process'?",
        ),
        (
            "engines: [a:1]\nprocess: {worker: 2}",
            "process.worker: there is no such setting: did you mean 'workers'?",
        ),
        (
            "engines: [{url: 'a:1', zzz: 2}]",
            "engines.0.zzz: there is no such setting: there are "
            "url, id, roles, models, ranks, capacity_tokens, engine_class",
        ),
        (
            "engines: [a:1]\nprocess: {workers: 0}",
            "process.workers: 0: should be greater than or equal to 1 (Processes that serve the port: one a core)",
        ),
        (
            "engines: [a:1]\nprocess: {workers: two, drain_s: no way}",
            "process.workers: 'two': should be a valid integer, unable to parse string as an integer "
            "(Processes that serve the port: one a core) (1 more after this)",
        ),
        (
            "engines: [{id: x}]",
            "engines.0.url: missing (http://HOST:PORT of the engine, or HOST:PORT)",
        ),
        (
            "engines: [{url: 'a:1', roles: [prefil]}]",
            "engines.0.roles.0: 'prefil': should be 'prefill', 'decode' or 'encode' "
            "(What it does: prefill, decode, encode)",
        ),
        (
            "engines: ['http://a:1/v1']",
            "engines.0.url: 'http://a:1/v1': must end after the port: paths are the requests' "
            "(http://HOST:PORT of the engine, or HOST:PORT)",
        ),
        ("engines: [a:1, 'http://a:1']", "engines: 'a:1' is named twice: give each its own address, or an id"),
        ("", "engines: none: list some, name a source below `discovery`, or use --engines"),
        (
            "engines: [{url: 'a:1', roles: [prefill]}]",
            "engines: none has the role decode: a request needs one that prefills, one that decodes",
        ),
        ("- a", "must have sections, as `engines:`, not ['a']"),
        (
            "engines: [a:1]\nadmin: 3",
            "admin: 3: should be a valid dictionary or instance of AdminConfig (The port of metrics and status)",
        ),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, text) == line


@pytest.mark.parametrize("url", ["", "ftp://a:1", "http://", "http://a:99999", "http://a:x", "http://u:p@a:1", "a b:1"])
def test_an_engine_needs_an_address(url: str) -> None:
    with pytest.raises(RouterConfigError, match=r"^here: engines\.0\.url: "):
        checked({"engines": [url]}, "here")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a", "http://a:80"),
        ("https://a", "https://a:443"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("HTTP://A.b:8000/", "http://a.b:8000"),
    ],
)
def test_addresses_have_one_form(given: str, url: str) -> None:
    assert checked({"engines": [given]}, "here").engines[0].url == url


@pytest.mark.parametrize(
    "secret",
    [
        {"admin": {"token": "hunter2"}},
        {"identity": {"keys": [{"name": "a", "sha256": "hunter2"}]}},
        {"identity": {"keys": [{"name": "a", "sha256": "hunter2", "file": "f"}]}},
        {"identity": {"everybody": {"cache_salt": "hunter2/@"}}},
        {"tracing": {"headers": {"authorization": ["hunter2"]}}},
        {"store": {"socket": "s", "token_env": ["hunter2"]}},
    ],
    ids=repr,
)
def test_the_value_of_a_secret_is_not_said(secret: dict[str, Any]) -> None:
    with pytest.raises(RouterConfigError, match=": its value: ") as refused:
        checked({"engines": ["a:1"], **secret}, "here")
    assert "hunter2" not in str(refused.value)


def test_numbers_of_tokens_are_no_secrets() -> None:
    with pytest.raises(RouterConfigError, match=r"here: entry\.image_tokens: -1: should be greater"):
        checked({"engines": ["a:1"], "entry": {"image_tokens": -1}}, "here")


def test_not_yaml(tmp_path: Path) -> None:
    assert refusal(tmp_path, "engines: [a").startswith("not YAML: while parsing a flow sequence")
    assert refusal(tmp_path, "a: !!python/object/apply:os.getcwd []").startswith("not YAML: could not determine")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RouterConfigError, match="nowhere.yaml: No such file or directory$"):
        ConfigSource(tmp_path / "nowhere.yaml").read()
    with pytest.raises(RouterConfigError, match="Is a directory$"):
        ConfigSource(tmp_path).read()


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    assert refusal(tmp_path, "#" * (MAX_FILE_BYTES + 1)).startswith("larger than 4,194,304 bytes")
    (tmp_path / "router.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RouterConfigError, match="not YAML"):
        ConfigSource(tmp_path / "router.yaml").read()


def test_variables_are_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, 'engines: ["${HOST}:${PORT:-8000}"]\nprocess: {workers: "${WORKERS}"}')
    settings = ConfigSource(path).read({"HOST": "a", "WORKERS": "2"})
    assert settings == {"engines": ["a:8000"], "process": {"workers": "2"}}
    assert checked(settings, "here").process.workers == 2


def test_a_variable_that_is_not_set(tmp_path: Path) -> None:
    path = written(tmp_path, 'engines: ["a:1", "${NOWHERE}:1"]')
    with pytest.raises(RouterConfigError) as refused:
        ConfigSource(path).read({})
    remedy = "export NOWHERE, or write ${NOWHERE:-default}"
    assert str(refused.value) == f"{path}: engines.1: ${{NOWHERE}} is not set: {remedy}"


@pytest.mark.parametrize(
    "discovery",
    [
        {"file": {"path": "engines.yaml"}},
        {"dns": [{"name": "engines.local", "roles": ["decode"]}]},
        {"kubernetes": [{"service": "vllm", "port": "http"}, {"service": "vllm", "port": 8000}]},
    ],
)
def test_engines_may_be_found_instead(discovery: dict[str, Any]) -> None:
    assert checked({"discovery": discovery}, "here").engines == ()


def test_dates_stay_strings(tmp_path: Path) -> None:
    path = written(tmp_path, "engines: [{url: 'a:1', id: 2026-01-01}]")
    assert prepare(ConfigSource(path))[0].engines[0].id == "2026-01-01"


def test_a_reload_takes_up_some_sections_and_names_the_others(tmp_path: Path) -> None:
    """A worker that is started later is given the same: of what waits for a restart it has what the others have."""
    file = written(tmp_path, f"engines: [{ENGINE}]")
    before = prepare(ConfigSource(file))[1].config
    written(
        tmp_path,
        """
        engines: [other:1]
        identity: {everybody: {tenant: new}}
        entry: {image_tokens: 7}
        admin: {listen: "127.0.0.1:1"}
        """,
    )
    command = [sys.executable, "-m", "deepinfer_router.reload"]
    asked = msgpack.packb({"source": ConfigSource(file).plain(), "config": before})
    answer = msgpack.unpackb(subprocess.run(command, input=asked, capture_output=True, check=True).stdout)
    assert answer["needs_restart"] == ["admin", "entry"]
    assert [engine["url"] for engine in answer["engines"]] == ["http://other:1"]
    after, was = pickle.loads(answer["config"]), pickle.loads(before)
    assert after.identity.everybody.tenant == "new" and after.engines[0].url == "http://other:1"
    assert (after.entry, after.admin) == (was.entry, was.admin)
