"""vLLM on the emulated device; run by `test_emulated_npu` in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from engine.harness import GOLDEN, golden_prompts, model_of
from engine.kvstore import ask, engine_on, finish_stores, tier_of
from engine.test_dspark import COUNT, Case, accepted, make_case, start
from engine.test_images import SMALL, generate, mixed_questions, write_oracle

NPU = torch.device("npu", 0)


def runner_of(backend: EngineBackend) -> Any:
    return backend._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def assert_all_there(model: Any) -> None:
    """Every parameter, buffer and cache row of a model is on the device."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    caches = {module.name: module.kv_cache for module in model.modules() if isinstance(module, PagedCache)}
    assert tensors and {n: t.device for n, t in {**tensors, **caches}.items() if t.device != NPU} == {}


def test_the_platform_is_out_of_the_tree() -> None:
    assert type(current_platform).__qualname__ == "EmulatedNpuPlatform" and current_platform.is_out_of_tree()


def test_a_llama() -> None:
    asked = json.loads(os.environ["ASKED"])
    backend = EngineBackend(Path(os.environ["LLAMA"]), "float32", "plain", kv_cache_memory_bytes=32 << 20)
    try:
        runner = runner_of(backend)
        assert_all_there(runner.model)
        assert runner.kv_caches and {cache.device for cache in runner.kv_caches} == {NPU}
        found = backend.generate_many(asked["prompts"], len(asked["answers"][0]), logits=False)
        assert [answer.ids for answer in found] == asked["answers"]
    finally:
        backend.close()


def test_v41_with_its_store(tmp_path: Path) -> None:
    """The golden answers, computed in one engine and, with rows from the store, in another."""
    name, root = "v41-tiny-a", tmp_path / "root"
    prompts = golden_prompts(name)
    ids, answers = [p.input_ids.tolist() for p in prompts], [p.gen_ids.tolist() for p in prompts]
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    with engine_on(GOLDEN / name, root, kv_cache_memory_bytes=64 << 20) as backend:
        assert_all_there(model_of(backend))
        found = backend.generate_many(ids, max(map(len, answers)), logits=False)
        assert [f.ids[: len(a)] for f, a in zip(found, answers, strict=True)] == answers
        finish_stores(backend)
        assert tier_of(backend)._store.stats().stores > 0
    with engine_on(GOLDEN / name, root, kv_cache_memory_bytes=64 << 20) as backend:
        again, cached = ask(backend, ids[longest], len(answers[longest]))
        assert again == answers[longest] and cached > len(ids[longest]) // 2
        stats = tier_of(backend)._store.stats()
        assert stats.hits > 0 and not stats.misses


def test_v41_with_images(tmp_path: Path) -> None:
    """The reference's answers, with the tower on the device and prompts cut inside images."""
    oracle, questions = write_oracle(tmp_path / "seeing"), mixed_questions()[:3]
    backend = EngineBackend(oracle.directory, "float32", "plain", runner="V1", max_num_batched_tokens=40, **SMALL)
    try:
        assert_all_there(model_of(backend))
        oracle.check(generate(backend, questions), questions)
    finally:
        backend.close()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("dspark"))


def test_dspark_with_every_draft(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's answers, with drafts that the device has drawn and that stand and fall."""
    monkeypatch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", "fixed")
    backend = start(case, runner="V2")
    try:
        runner = runner_of(backend)
        assert_all_there(model_of(backend))
        assert_all_there(runner.speculator.model)
        assert runner.adaptive_verification is None
        assert [found.ids for found in backend.generate_many(case.prompts, COUNT, logits=False)] == case.answers
        drafted, stood = accepted(backend)
        assert 0.3 * drafted < stood < 0.9 * drafted
    finally:
        backend.close()


def test_dspark_with_a_budget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's answers. What drafts cost on this device says nothing, so whether any are drawn is left open."""
    monkeypatch.delenv("DEEPINFER_VLLM_DSPARK_BUDGET", raising=False)
    backend = start(case, runner="V2")
    try:
        assert type(runner_of(backend).adaptive_verification).__qualname__ == "DelayedVerifier"
        assert [found.ids for found in backend.generate_many(case.prompts, COUNT, logits=False)] == case.answers
    finally:
        backend.close()
