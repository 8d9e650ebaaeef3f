"""The steps of `deepinfer demo` on the shared server, and its end when the server does not come up."""

import subprocess
import sys
from pathlib import Path

import openai
import pytest

from deepinfer_vllm import demo
from deepinfer_vllm.server_process import ServerProcess
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
