"""Several processes on one golden checkpoint: the tokens and logits of one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, ServerProcess
from engine.harness import GOLDEN, Engine, golden_prompts, served_ids

LIMIT = 5e-5  # float32, sums in another order
START_LIMIT_SECONDS = 300


@pytest.fixture(autouse=True)
def cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would bind each process to a NUMA node of its own."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.mark.parametrize(("name", "flags"), [("v41-tiny-a-fp8", {}), ("v41-tiny-b", {"enable_expert_parallel": True})])
def test_tensor_parallel(engine: Engine, name: str, flags: dict[str, Any]) -> None:
    prompts = golden_prompts(name)
    with engine(name, tensor_parallel_size=2, max_num_batched_tokens=300, **flags) as backend:
        answers = backend.generate_many([p.input_ids.tolist() for p in prompts], len(prompts[0].gen_ids))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == prompt.gen_ids.tolist()
        assert (answer.logits - prompt.gen_logits).abs().max() <= LIMIT


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Two data-parallel ranks that share their experts."""
    flags = ("--data-parallel-size", "2", "--enable-expert-parallel", "--max-model-len", "1024")
    environment = {
        **SMALL_CPU_ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # each rank is a process
        "DEEPINFER_VLLM_DECODER_REPLAY": "0",  # an approximation, and the golden tokens are not
    }
    with ServerProcess(
        GOLDEN / "v41-tiny-a", tmp_path / "server.log", (*SMALL_CPU_FLAGS, *flags), environment
    ) as process:
        process.wait_until_healthy(START_LIMIT_SECONDS)
        yield process


def test_data_parallel_experts(server: ServerProcess) -> None:
    """Alone, a request has the other rank run along without one; together, the ranks' steps differ in length."""
    prompts = golden_prompts("v41-tiny-a")
    with httpx.Client(base_url=server.url, timeout=120) as http:
        answer = partial(served_ids, http, "v41-tiny-a")
        want = [prompt.gen_ids.tolist() for prompt in prompts]
        assert [answer(prompt) for prompt in prompts] == want
        with ThreadPoolExecutor(2 * len(prompts)) as pool:
            assert list(pool.map(answer, [*prompts, *prompts])) == [*want, *want]
        metrics = http.get("/metrics").text.splitlines()
    prefilled = [float(line.split()[-1]) for line in metrics if line.startswith("vllm:prompt_tokens_total{")]
    assert len(prefilled) == 2 and all(prefilled) and sum(prefilled) == 3 * sum(len(p.input_ids) for p in prompts)
