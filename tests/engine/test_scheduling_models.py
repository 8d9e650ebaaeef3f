"""The chunk scheduler with LoRA adapters and pooling models: what vLLM's own scheduler gives, from other chunks."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.scheduling import NAME
from engine.llama import write_llama
from engine.test_scheduling_cost import Ends, small_chunks  # noqa: F401

LENGTHS = (300, 41, 170, 256)
PROMPTS = [[Random(length).randrange(3, 500) for _ in range(length)] for length in LENGTHS]
STOCK: dict[str, Any] = {}
OURS: dict[str, Any] = {"scheduler_cls": NAME}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("scheduled") / "llama")


def start(llama: Path, **arguments: Any) -> EngineBackend:
    return EngineBackend(llama, "float32", "plain", max_num_batched_tokens=128, max_model_len=512, **arguments)


class Pooling(EngineBackend):
    """Its `runner` is another thing than vLLM's."""

    def _start(self, directory: Path, dtype: str, engine_args: dict[str, Any]) -> None:
        super()._start(directory, dtype, {**engine_args, "runner": "pooling"})


def write_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter of rank 8 that changes answers."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    drawn, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(2):
        for name, rows in (("q_proj", 128), ("v_proj", 64)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn((8, 128), generator=drawn) * 0.2
            weights[f"{stem}.lora_B.weight"] = torch.randn((rows, 8), generator=drawn) * 0.2
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


def test_requests_of_two_adapters_that_do_not_fit_together(llama: Path, tmp_path: Path) -> None:
    """One adapter at a time: requests of the other one, and their chunks, wait. None without an adapter is beside them:
    vLLM 0.32 on a CPU gives those the adapter of their neighbours, whichever scheduler there is."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapters = [LoRARequest(f"a{n}", n, str(write_adapter(tmp_path / f"a{n}", n))) for n in (1, 2)]
    given = [({"prompt_token_ids": ids}, adapter) for ids in PROMPTS for adapter in adapters]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers = []
    for chosen in (STOCK, OURS):
        backend = start(llama, enable_lora=True, max_loras=1, max_lora_rank=8, **chosen)
        try:
            ends = Ends(backend)
            prompts, of = zip(*given, strict=True)
            found = backend._llm.generate(list(prompts), params, lora_request=list(of), use_tqdm=False)
            answers.append([list(each.outputs[0].token_ids) for each in found])
        finally:
            backend.close()
    assert answers[1] == answers[0]
    assert answers[0][0] != answers[0][1]  # adapters change answers
    assert all(end % 16 == 0 or end == length for length, of in ends.by_length.items() for end in of)
    assert len(ends.by_length[300]) > 4


@pytest.mark.parametrize(("pooling", "chunked"), [("LAST", True), ("MEAN", False)])
def test_embeddings(llama: Path, pooling: str, chunked: bool) -> None:
    """vLLM computes a mean over tokens from whole prompts only, and so does this scheduler then."""
    found = []
    for chosen in (STOCK, OURS):
        pooler = {"seq_pooling_type": pooling, "task": "embed"}
        backend = Pooling(
            llama, "float32", "plain", max_model_len=512, skip_tokenizer_init=False, pooler_config=pooler, **chosen
        )
        try:
            ends = Ends(backend)
            outputs = backend._llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
            found.append(torch.tensor([output.outputs.embedding for output in outputs]))
        finally:
            backend.close()
    assert (found[1] - found[0]).abs().max() <= 1e-5 and found[0].shape == (4, 128)
    assert ends.by_length[300] == ({64, 128, 192, 256, 300} if chunked else {300})
