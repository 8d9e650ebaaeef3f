"""`vllm serve` with the chunk scheduler says what it predicts of steps, and what they took."""

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
from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, ServerProcess
from serving.conftest import START_LIMIT_SECONDS

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    directory = tmp_path_factory.mktemp("chunks")
    create(directory / "tiny", layers=4, shards=1, dtype="float32")
    costs = directory / "costs.json"
    environment = SMALL_CPU_ENVIRONMENT | {
        "DEEPINFER_VLLM_SCHED_GRID": "16",
        "DEEPINFER_VLLM_SCHED_TARGET_MS": "0.001",  # below any step: chunks beside decodes are of one piece
        "DEEPINFER_VLLM_SCHED_COSTS": str(costs),
    }
    flags = (*SMALL_CPU_FLAGS, "--scheduler-cls", NAME)
    with ServerProcess(directory / "tiny", directory / "server.log", flags, environment) as process:
        process.wait_until_healthy(START_LIMIT_SECONDS)
        yield process, costs


def values(url: str) -> dict[str, float]:
    """Of ours, by sample's name without prefix."""
    prefix = DEFINITIONS.prefix
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith(prefix)]
    return {sample.name.removeprefix(prefix): sample.value for sample in samples if "le" not in sample.labels}


def test_metrics_and_the_file_of_costs(served: tuple[ServerProcess, Path]) -> None:
    server, costs = served
    assert {f"{name}_total" for name in COUNTERS} <= values(server.url).keys()
    body = {"model": str(server.command[2]), "prompt": [7] * 100, "max_tokens": 300, "ignore_eos": True, "n": 2}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
    found = values(server.url)
    assert found["chunk_tokens_total"] >= 100 and found["chunks_total"] >= 2
    assert GAUGES.keys() <= found.keys() and found["target_seconds"] == 1e-6
    assert {f"{name}_count" for name in HISTOGRAMS} <= found.keys()
    assert found["measured_step_seconds_count"] == found["predicted_step_seconds_count"] > 256
    assert len(read_step_table(costs).costs) == 1  # written while it serves
