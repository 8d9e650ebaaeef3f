"""Two data-parallel engines whose experts vLLM's EPLB moves while they answer: the tokens of one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, ServerProcess
from engine.cpu_eplb import eplb_on_cpu
from engine.harness import GOLDEN, golden_prompts, served_ids

START_LIMIT_SECONDS = 600
NAME = "v41-tiny-a"
MOST_ROUNDS = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """The preset fills what the flags leave open: redundant experts, one for each of 2 ranks."""
    flags = (
        *("--data-parallel-size", "2", "--api-server-count", "1", "--enable-expert-parallel", "--enable-eplb"),
        *("--max-model-len", "1024"),
        *("--eplb-config.window_size", "8", "--eplb-config.step_interval", "12", "--eplb-config.use_async", "false"),
    )
    environment = {
        **SMALL_CPU_ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # each rank is a process
        "DEEPINFER_VLLM_DECODER_REPLAY": "0",  # an approximation, and the golden tokens are not
        "DEEPINFER_VLLM_EPLB": "decode",
    }
    with (
        eplb_on_cpu(tmp_path),
        ServerProcess(GOLDEN / NAME, tmp_path / "server.log", (*SMALL_CPU_FLAGS, *flags), environment) as process,
    ):
        process.wait_until_healthy(START_LIMIT_SECONDS)
        yield process


def test_synchronous(server: ServerProcess, tmp_path: Path) -> None:
    prompts = golden_prompts(NAME)
    want = [prompt.gen_ids.tolist() for prompt in prompts]
    with httpx.Client(base_url=server.url, timeout=120) as http:
        answer = partial(served_ids, http, NAME)

        def told(name: str) -> dict[str, float]:
            """A metric of each engine."""
            lines = http.get("/metrics").text.splitlines()
            found = [line for line in lines if line.startswith(f"vllm:deepinfer_eplb_{name}{{")]
            return {line.split('engine="')[1][0]: float(line.split()[-1]) for line in found}

        for _ in range(MOST_ROUNDS):
            with ThreadPoolExecutor(len(prompts)) as pool:
                assert list(pool.map(answer, prompts)) == want
            moved = told("moved_experts_total")
            if len(told("moe_lb")) == 2 and all(moved.values()):
                break
        rebalances = told("rebalances_total")
    assert rebalances.keys() == moved.keys() == {"0", "1"} and all(moved.values()) and min(rebalances.values()) >= 1
    log = (tmp_path / "server.log").read_text()
    assert log.count("DEEPINFER_VLLM_EPLB=decode sets of EPLB: num_redundant_experts=2.") == 1
