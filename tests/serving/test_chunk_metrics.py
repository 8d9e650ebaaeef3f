"""`vllm serve` with the chunk scheduler: what it says of predicted and measured steps, and images beside decodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer_costmodel.step_table import read_step_table
from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.scheduling import NAME
from deepinfer_vllm.scheduling.metrics import COUNTERS, DEFINITIONS, GAUGES, HISTOGRAMS
from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, V41_FLAGS, ServerProcess
from images import noise
from serving.client import MODEL, Json
from serving.conftest import START_LIMIT_SECONDS
from serving.test_images import data_url, encoded, question

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    directory = tmp_path_factory.mktemp("chunks")
    create(directory / "tiny", layers=4, shards=1, dtype="float32", vision=True)
    costs = directory / "costs.json"
    environment = SMALL_CPU_ENVIRONMENT | {
        "DEEPINFER_VLLM_SCHED_GRID": "16",
        "DEEPINFER_VLLM_SCHED_TARGET_MS": "0.001",  # below any step: chunks beside decodes are of one piece
        "DEEPINFER_VLLM_SCHED_PREFILL_SHARE": "0",
        "DEEPINFER_VLLM_SCHED_COSTS": str(costs),
    }
    flags = (*V41_FLAGS, *SMALL_CPU_FLAGS, "--scheduler-cls", NAME, "--served-model-name", MODEL)
    with ServerProcess(directory / "tiny", directory / "server.log", flags, environment) as process:
        process.wait_until_healthy(START_LIMIT_SECONDS)
        yield process, costs
        assert process.is_healthy(), process.log_text()[-4000:]


def values(url: str) -> dict[str, float]:
    """Of ours, by sample's name without prefix."""
    prefix = DEFINITIONS.prefix
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith(prefix)]
    return {sample.name.removeprefix(prefix): sample.value for sample in samples if "le" not in sample.labels}


def test_metrics_and_the_file_of_costs(served: tuple[ServerProcess, Path]) -> None:
    server, costs = served
    assert {f"{name}_total" for name in COUNTERS} <= values(server.url).keys()
    body = {"model": MODEL, "prompt": [7] * 100, "max_tokens": 300, "ignore_eos": True, "n": 2}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
    found = values(server.url)
    assert found["chunk_tokens_total"] >= 100 and found["chunks_total"] >= 2
    assert GAUGES.keys() <= found.keys() and found["target_seconds"] == 1e-6
    assert {f"{name}_count" for name in HISTOGRAMS} <= found.keys()
    assert found["measured_step_seconds_count"] == found["predicted_step_seconds_count"] > 256
    assert len(read_step_table(costs).costs) == 1  # written while it serves


def test_images_beside_decodes_are_answered_as_alone(served: tuple[ServerProcess, Path]) -> None:
    """Salts keep what one request has cached from the other."""
    server, _ = served
    images = [data_url(encoded(noise(200, 90, seed=seed))) for seed in (1, 2)]

    def ask(salt: str) -> Json:
        body = (
            {"model": MODEL, "temperature": 0, "cache_salt": salt}
            | question(*images, text="What is this? " * 30)
            | {"max_tokens": 12}
        )
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        choice: Json = answer.json()["choices"][0]["message"]
        return choice

    alone = ask("alone")
    body = {"model": MODEL, "prompt": [7] * 20, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        before = values(server.url)
        beside = ask("beside")
        after = values(server.url)
        next(lines)  # it was still decoding
    assert beside == alone and alone["content"]
    assert after["mixed_steps_total"] >= before["mixed_steps_total"] + 2
