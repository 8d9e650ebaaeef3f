"""What the engine tests share: golden prompts, and hands on the engine's inside."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from deepinfer_vllm.checkpoint import golden
from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.checkpoint.golden import Prompt
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
Engine = Callable[..., AbstractContextManager[EngineBackend]]


def golden_prompts(name: str, numerics: str = "plain") -> tuple[Prompt, ...]:
    """Prompts of a golden directory with the values for these numerics."""
    return golden.read(GOLDEN / name).values[numerics].prompts


def served_ids(http: httpx.Client, name: str, prompt: Prompt) -> list[int]:
    """What a server of this golden directory answers to one of its prompts, as long as the golden answer."""
    body = {
        "model": str(GOLDEN / name),
        "prompt": prompt.input_ids.tolist(),
        "max_tokens": len(prompt.gen_ids),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return ids


def model_of(backend: EngineBackend) -> Any:
    """The model inside the engine."""
    core = backend._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.model


def sample(backend: EngineBackend, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` tokens drawn after each prompt, each request with a seed of its own."""
    from vllm import SamplingParams

    fixed = {"temperature": 1.0, "max_tokens": count, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(seed=number, **fixed) for number in range(len(prompts))]
    outputs = backend._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def poison(backend: EngineBackend) -> None:
    """Fill every cache row with what must never reach a result."""
    for module in model_of(backend).modules():
        if isinstance(module, PagedCache):
            module.kv_cache.fill_(float("nan") if module.kv_cache.is_floating_point() else 2**31 - 1)


def preempt_all_every(backend: EngineBackend, steps: int) -> None:
    """From now on the scheduler preempts every running request each `steps` steps; their cached blocks stay."""
    scheduler, original, count = backend.scheduler, backend.scheduler.schedule, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count % steps == 0:
            while scheduler.running:
                scheduler._preempt_request(scheduler.running.pop(), time.monotonic(), drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.clear()
        return original(*args, **kwargs)

    scheduler.schedule = interrupted


def preemptions(backend: EngineBackend) -> "list[str]":
    """A list that will hold the id of every request the scheduler preempts from now on."""
    scheduler = backend.scheduler
    preempted: list[str] = []
    original = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return preempted
