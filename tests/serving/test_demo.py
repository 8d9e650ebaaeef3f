"""The steps of examples/demo.py on the shared server, and its end when the server does not come up."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import openai
import pytest

from deepinfer_vllm.server_process import ServerProcess
from serving.client import MODEL


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # pydantic looks up the annotations of a class in its module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("step", "shown"), [("chat", "tokens/s"), ("call_tool", "get_weather("), ("answer_json", "Forecast(")]
)
def test_answers(
    demo: ModuleType, client: openai.OpenAI, capsys: pytest.CaptureFixture[str], step: str, shown: str
) -> None:
    getattr(demo, step)(client, MODEL)
    assert shown in capsys.readouterr().out


def test_it_says_what_ran(demo: ModuleType, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show_what_ran(server)
    out = capsys.readouterr().out
    assert "vLLM 0." in out
    for fact in ("deepinfer_vllm.models.deepseek_v41.model.DeepseekV41ForCausalLM", "platform cpu", "model runner V1"):
        assert fact in out


def test_a_server_that_does_not_come_up_ends_it(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, root / "examples" / "demo.py", "--directory", tmp_path / "demo", "--timeout", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "weights are random" in done.stdout
    assert "vllm serve did not answer within 0.5 seconds" in done.stderr
    assert f"last lines of {tmp_path / 'demo' / 'server.log'}" in done.stderr
