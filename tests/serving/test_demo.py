"""The steps of `deepinfer demo` on the shared server, and its end when the server does not come up."""

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from deepinfer_vllm import demo
from deepinfer_vllm.demo_router import Router
from deepinfer_vllm.demo_store import Asked
from deepinfer_vllm.kv_connector import CONNECTOR
from deepinfer_vllm.kv_connector.config import ConnectorConfig
from deepinfer_vllm.server_process import ServerError, ServerProcess
from serving.client import MODEL


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("step", "shown"), [("chat", "tokens/s"), ("call_tool", "get_weather("), ("answer_json", "Forecast(")]
)
def test_answers(client: openai.OpenAI, capsys: pytest.CaptureFixture[str], step: str, shown: str) -> None:
    getattr(demo, step)(client, MODEL)
    assert shown in capsys.readouterr().out


def test_it_says_what_ran(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show_what_ran(server)
    out = capsys.readouterr().out
    assert "vLLM 0." in out
    for fact in ("deepinfer_vllm.models.deepseek_v41.model.DeepseekV41ForCausalLM", "platform cpu", "model runner V1"):
        assert fact in out


def test_a_long_question(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    """It fits the server's 4096 tokens, and fills most of them."""
    asked = demo.ask_long(client, MODEL)
    assert 3500 < asked.prompt_tokens < 4096 and asked.answer and asked.seconds > 0
    assert f"{asked.prompt_tokens} tokens, {asked.hit_tokens} of them found" in capsys.readouterr().out


def test_both_times_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    demo.compare(Asked("a", 3809, 0, 0.95), Asked("a", 3809, 3712, 0.131))
    out = capsys.readouterr().out
    assert "3712 of 3809 tokens" in out and "0.13 s" in out and "0.95 s" in out


@pytest.mark.parametrize(("at_first", "after"), [(0, 0), (64, 3712)])
def test_hits_that_show_nothing_end_it(at_first: int, after: int) -> None:
    with pytest.raises(demo.DemoError, match=f"{at_first} tokens were found at first and {after} after the restart"):
        demo.compare(Asked("a", 3809, at_first, 1.0), Asked("a", 3809, after, 1.0))


def test_the_store_lies_in_the_demos_directory(tmp_path: Path) -> None:
    (tmp_path / "kv/store").mkdir(parents=True)
    (tmp_path / "kv/store/old").write_text("of another run")
    with demo.empty_store(tmp_path) as flags:
        config = json.loads(flags[flags.index("--kv-transfer-config") + 1])
        assert config["kv_connector"] == CONNECTOR
        found = ConnectorConfig.parse(config["kv_connector_extra_config"])
        assert Path(found.root) == tmp_path / "kv/store" and list(Path(found.root).iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_come_up_ends_it(tmp_path: Path) -> None:
    deepinfer = Path(sys.executable).with_name("deepinfer")
    command = [deepinfer, "demo", "--directory", tmp_path / "demo", "--timeout", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "weights are random" in done.stdout
    assert "vllm serve did not answer within 0.5 seconds" in done.stderr
    assert f"last lines of {tmp_path / 'demo' / 'server.log'}" in done.stderr


def test_a_directory_that_cannot_be_made_ends_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert demo.main(tmp_path / "file", timeout_seconds=1) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("demo: ") and str(tmp_path / "file") in error and "\n" not in error


def test_the_router_before_a_server(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    router = Router(tmp_path, checkpoint, [server.url])
    with router.running(tmp_path / "router.log", timeout_seconds=120):
        client, model = demo.client_of(router.url)
        for _ in range(20):  # a busy machine is too slow now and then for a CHECK, which is left out then
            demo.chat(client, model)
            assert "tokens/s" in capsys.readouterr().out
            counts = router.counts()
            if 'checks_total{result="namespace"}' in counts:
                break
        assert counts['checks_total{result="namespace"}'] == 1 and counts["checked_tokens_total"] == 0
        with pytest.raises(demo.DemoError, match="asked for 0 tokens and knew of none"):
            demo.show_routing(router)
    with pytest.raises(OSError):
        router.counts()


def test_a_router_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    router = Router(tmp_path, tmp_path, ["http://127.0.0.1:9"])  # there is no directory `store`
    with (
        pytest.raises(ServerError, match=r"router or store daemon ended\nlast lines of .*router\.log"),
        router.running(tmp_path / "router.log", timeout_seconds=120),
    ):
        pass
