"""A real engine behind the router: the same tokens as without it, and vLLM's own benchmark through it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from deepinfer_vllm.server_process import ServerProcess, vllm_script
from serving.client import MODEL

sys.path.append(str(Path(__file__).parent.parent / "router"))

from router_process import RouterProcess  # noqa: E402

ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count as far as you can."}],
    "max_tokens": 24,
    "temperature": 0,
    "stream": True,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}
REQUESTS = 12


@pytest.fixture(scope="module")
def router(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [sys.executable, "-m", "deepinfer_vllm.cli.main", "router", "--engines", server.url]
    command += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    with RouterProcess(command, tmp_path_factory.mktemp("router")) as process:
        yield f"http://127.0.0.1:{process.port}"


def tokens(url: str) -> tuple[list[int], str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        choices = [event.choices[0] for event in client.chat.completions.create(**ASKED) if event.choices]
    ids = [token for choice in choices for token in (choice.model_extra or {}).get("token_ids") or ()]
    return ids, "".join(choice.delta.content or "" for choice in choices)


def test_a_stream_has_the_tokens_of_the_engine(server: ServerProcess, router: str) -> None:
    direct = tokens(server.url)
    assert len(direct[0]) == 24 and tokens(router) == direct


def test_vllms_benchmark_runs_through_it(router: str, checkpoint: Path, tmp_path: Path) -> None:
    command = [str(vllm_script()), "bench", "serve", "--backend", "openai", "--base-url", router]
    command += ["--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", str(checkpoint)]
    command += ["--tokenizer-mode", "deepseek_v41", "--dataset-name", "random", "--random-input-len", "32"]
    command += ["--random-output-len", "8", "--ignore-eos", "--num-prompts", str(REQUESTS), "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "found.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (REQUESTS, 8 * REQUESTS)
