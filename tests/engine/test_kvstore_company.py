"""The store beside what else an engine may be asked for: other connectors, ranks, adapters, images, drafts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_vllm.checkpoint.backends import EngineBackend
from engine import memory_connector, test_dspark
from engine import test_images as seeing
from engine.harness import GOLDEN, golden_prompts
from engine.kvstore import ask, engine_on, finish_stores, forget, tier_of, transfer
from engine.llama import write_llama
from engine.test_replay import WINDOW, assert_truncated

LONG = golden_prompts("v41-tiny-a")[4].input_ids.tolist()  # 257 tokens


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama."""
    return write_llama(tmp_path_factory.mktemp("model") / "llama")


@contextmanager
def engine_with_neighbour(checkpoint: Path, root: Path, kv_role: str) -> Iterator[EngineBackend]:
    """Our connector, as the second of two."""
    root.mkdir(exist_ok=True)
    neighbour = {
        "kv_connector": "MemoryConnector",
        "kv_connector_module_path": memory_connector.__name__,
        "kv_role": "kv_both",
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [neighbour, transfer(root, kv_role)]},
    }
    backend = EngineBackend(checkpoint, "float32", "plain", kv_transfer_config=several, kv_cache_memory_bytes=32 << 20)
    try:
        yield backend
    finally:
        backend.close()


def ours(backend: EngineBackend) -> Any:
    return backend.scheduler.connector.sub_connectors[1]


def test_beside_another_connector(llama: Path, tmp_path: Path) -> None:
    """Both keep what is computed; the first that has a prompt brings it; an answer waits for our blocks there too."""
    memory_connector.STORE.clear()
    with engine_with_neighbour(llama, tmp_path / "root", "kv_producer") as backend:
        output = backend._run([LONG], 16)[0]
        answer = list(output.outputs[0].token_ids)
        assert output.kv_transfer_params == {"kvstore": {"stored_tokens": 256}}
        [tier] = ours(backend).scheduler.manager.secondary_tiers
        assert len(tier._store.index.entries(limit=100)) >= 256 // 32
        assert memory_connector.STORE
    with engine_with_neighbour(llama, tmp_path / "root", "kv_both") as backend:
        [tier] = ours(backend).scheduler.manager.secondary_tiers
        assert ask(backend, LONG) == (answer, 256)
        memory_connector.STORE.clear()
        assert backend._llm.llm_engine.reset_prefix_cache(reset_connector=True)
        before = tier._store.stats().hits
        assert ask(backend, LONG) == (answer, 256)
        assert tier._store.stats().hits - before == 256 // 32
        continued = {"kv_transfer_params": {"do_remote_decode": True}}
        [told], [untold] = (backend._run([LONG[100:]], 4, extra_args=extra) for extra in (continued, None))
        assert told.kv_transfer_params == {"kvstore": {"stored_tokens": 128}} and untold.kv_transfer_params is None


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and snapshots of two ranks, stored by one engine and loaded by itself and by the next."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    prompt = LONG[:200]
    arguments = {"replay": True, "runner": "V2", "tensor_parallel_size": 2, "extra": {"swa_bytes": 1 << 24}}
    with engine_on(GOLDEN / "v41-tiny-a", tmp_path / "root", **arguments) as backend:
        first = backend.generate(prompt, 60)
        turn = prompt + first.ids + LONG[-2:]
        forget(backend)
        snapshots = backend.scheduler.connector._snapshots
        assert_truncated(backend.generate(turn, 24), turn, len(prompt) - WINDOW)
        assert snapshots._ring.stats().counts["hit"] == 1
        assert tier_of(backend)._store.stats().hits > 0
        finish_stores(backend)
    with engine_on(GOLDEN / "v41-tiny-a", tmp_path / "root", **arguments) as backend:
        assert ask(backend, turn)[1] == 256


def write_adapter(directory: Path, seed: int) -> Path:
    """An adapter of the tiny llama's query projections, large enough to change answers."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn((8, 128), generator=drawn)
        tensors[f"{name}.lora_B.weight"] = torch.randn((128, 8), generator=drawn)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def test_adapters_keep_to_themselves(llama: Path, tmp_path: Path) -> None:
    """lmdeploy#4930: rows of one adapter are not another's, nor the model's own."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapters = [
        LoRARequest(name, number, str(write_adapter(tmp_path / name, number))) for number, name in ((1, "a"), (2, "b"))
    ]
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)

    def answer(backend: EngineBackend, adapter: Any) -> tuple[list[int], int]:
        given = [{"prompt_token_ids": LONG}]
        [output] = backend._llm.generate(given, params, lora_request=adapter, use_tqdm=False)
        return list(output.outputs[0].token_ids), int(output.num_cached_tokens or 0)

    with engine_on(llama, tmp_path / "root", **arguments) as backend:
        cold = []
        for adapter in (None, *adapters):
            answered, cached = answer(backend, adapter)
            assert cached == 0
            cold.append(answered)
            forget(backend)
        assert cold[0] != cold[1] != cold[2] != cold[0]
        for adapter, expected in zip((None, *adapters), cold, strict=True):
            assert answer(backend, adapter) == (expected, 256)
            forget(backend)


def test_images(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """An image's rows are found under that image only, by the next engine too."""
    oracle = seeing.write_oracle(tmp_path_factory.mktemp("seeing") / "tiny")
    questions = seeing.mixed_questions()
    expected = [(len(oracle.expanded(q)) - 1) // seeing.BLOCK * seeing.BLOCK for q in questions]
    cat, dog = questions[0], seeing.Question(questions[0].ids, (seeing.noise(300, 200, seed=9),))
    with engine_on(oracle.directory, tmp_path / "root", **seeing.SMALL) as backend:
        oracle.check(seeing.generate(backend, questions), questions)
        finish_stores(backend)
    with engine_on(oracle.directory, tmp_path / "root", **seeing.SMALL) as backend:
        assert (
            backend.cached_tokens(dog.for_vllm()) == 0
        )  # windows are stored where a prompt ends, and none ended before the image
        forget(backend)
        assert [backend.cached_tokens(q.for_vllm()) for q in questions] == expected
        forget(backend)
        oracle.check(seeing.generate(backend, [*questions, dog, cat]), [*questions, dog, cat])
        assert tier_of(backend)._store.stats().hits > 0


def test_drafts(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#55503: prompts that end on a block and a little after; vllm#52735: the draft's layers zero no hit."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    case = test_dspark.make_case(tmp_path_factory.mktemp("dspark"))
    long = case.prompts[-1]
    prompts = [long[: 64 + extra] for extra in (0, 1, 5)]
    answers = [case.reference.greedy(prompt, 16) for prompt in prompts]
    drafts = {"method": "dspark", "num_speculative_tokens": test_dspark.DRAFTS}
    arguments = {"speculative_config": drafts, "block_size": 16, "max_num_batched_tokens": 50, "max_model_len": 256}
    with engine_on(case.directory, tmp_path / "root", **arguments) as backend:
        for prompt, expected in zip(prompts, answers, strict=True):
            assert ask(backend, prompt)[0] == expected
            forget(backend)
    with engine_on(case.directory, tmp_path / "root", **arguments) as backend:
        for prompt, expected in zip(prompts, answers, strict=True):
            answered, cached = ask(backend, prompt)
            assert answered == expected
            assert cached >= 32
            forget(backend)
        assert tier_of(backend)._store.stats().hits > 0
