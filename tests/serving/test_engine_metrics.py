"""The router reads a real engine's metrics."""

import json
import time

import pytest

from deepinfer_router.scrape import Reading, read_metrics
from deepinfer_vllm.server_process import ServerProcess
from serving.client import MODEL, Api

pytestmark = pytest.mark.vllm
LIMIT_SECONDS = 60


def reading(api: Api) -> Reading:
    (found,) = read_metrics(api.http.get("/metrics").content, 1)
    return found


def test_load_capacity_and_progress(server: ServerProcess, api: Api) -> None:
    before = reading(api)
    assert before.active == 0 and before.kv_share == 0.0
    assert before.capacity_tokens is not None and before.capacity_tokens > 1000
    body = {"model": MODEL, "prompt": "a long story", "max_tokens": 200, "ignore_eos": True, "stream": True}
    during = before
    with api.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                during = reading(api)
                if during.running and during.kv_tokens and during.gaps > before.gaps:
                    break
    assert during.running == 1
    assert during.kv_tokens is not None and 0 < during.kv_tokens < during.capacity_tokens  # type: ignore[operator]
    until = time.monotonic() + LIMIT_SECONDS
    while (after := reading(api)).active and time.monotonic() < until:
        time.sleep(0.05)
    assert after.active == 0
    assert after.steps > before.steps and after.gaps > before.gaps and after.gap_seconds > before.gap_seconds
