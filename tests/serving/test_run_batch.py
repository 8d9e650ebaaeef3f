"""`vllm run-batch`: a file of requests in, a file of answers out."""

import json
import os
import subprocess
from pathlib import Path

from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, V41_FLAGS, vllm_script
from serving.client import MODEL, NO_THINKING, Api, Json, user

QUESTIONS = ["What is two and two?", "Name a colour.", "Who are you?"]


def request(number: int, question: str) -> Json:
    """One line of the input."""
    body = {
        "model": MODEL,
        "messages": [user(question)],
        "max_tokens": 12,
        "temperature": 0,
        "chat_template_kwargs": NO_THINKING,
    }
    return {"custom_id": f"question-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_answers_are_those_of_the_server(api: Api, checkpoint: Path, tmp_path: Path) -> None:
    requests = [request(number, question) for number, question in enumerate(QUESTIONS)]
    requests.append({**request(9, "too long"), "custom_id": "bad"})
    requests[-1]["body"]["messages"] = [user("water " * 5000)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in requests))

    flags = ("-i", source, "-o", target, "--model", checkpoint, "--served-model-name", MODEL)
    done = subprocess.run(
        [vllm_script(), "run-batch", *flags, *V41_FLAGS, *SMALL_CPU_FLAGS],
        env={**os.environ, **SMALL_CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    answers = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert list(answers) == [line["custom_id"] for line in requests]
    for number, question in enumerate(QUESTIONS):
        answer = answers[f"question-{number}"]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        [choice] = answer["response"]["body"]["choices"]
        assert choice["message"]["content"] == api.chat(question, max_tokens=12)["message"]["content"]
    assert answers["bad"]["response"]["status_code"] == 400
    assert "maximum context length" in json.dumps(answers["bad"]["error"])
