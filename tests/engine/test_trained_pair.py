"""The trained pair in vLLM's engine: the target's own answers, and drafts that stand as often as its card says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer
from deepinfer_vllm.training.architecture import TRAINED, trained_architecture
from deepinfer_vllm.training.prompts import held_out_prompts
from deepinfer_vllm.training.shipped import shipped_weights, write_trained
from deepinfer_vllm.training.target import Target

COUNT, DRAFTS = 40, 5


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBackend]:
    """Every draft is verified: a budget would choose by what steps cost on the machine that tests run on."""
    directory: Path = tmp_path_factory.mktemp("pair")
    write_trained(directory, dtype="float32", force=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_VLLM_DSPARK_BUDGET", "fixed")
        backend = EngineBackend(
            directory,
            "float32",
            "plain",
            runner="V2",
            block_size=16,
            disable_log_stats=False,
            speculative_config={"method": "dspark", "num_speculative_tokens": DRAFTS},
        )
        yield backend
        backend.close()


def accepted_per_position(backend: EngineBackend) -> tuple[int, list[int]]:
    """Blocks drafted so far, and how often their first, second, ... token stood."""
    metrics = {m.name: m for m in backend._llm.get_metrics()}
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    return int(drafts), list(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values)


def prompts(workload: str, count: int) -> list[list[int]]:
    tokenizer = build_tokenizer(TRAINED.vocab_size)
    made = held_out_prompts(count, workloads=[workload], tokens=96)
    return [tokenizer.encode(prompt["prompt"]).ids for prompt in made]


def accepted_length(backend: EngineBackend, asked: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Tokens a step of greedy answers, and the answers."""
    before_drafts, before = accepted_per_position(backend)
    answers = [found.ids for found in backend.generate_many(asked, COUNT, logits=False)]
    drafts, stood = accepted_per_position(backend)
    shares = [(now - then) / (drafts - before_drafts) for now, then in zip(stood, before, strict=True)]
    assert shares == sorted(shares, reverse=True)
    return 1 + sum(shares), answers


def test_drafts_stand_by_what_the_text_is_like(backend: EngineBackend) -> None:
    lengths, asked, answers = {}, [], []
    for workload in ("records", "code", "lists", "sums", "prose", "noise"):
        given = prompts(workload, 4)
        lengths[workload], found = accepted_length(backend, given)
        asked += given
        answers += found
    assert sum(lengths.values()) / len(lengths) >= 3.0
    assert lengths["noise"] < 2.5 < 4.0 < min(lengths[workload] for workload in ("records", "code", "lists"))
    _assert_greedy(asked, answers)


def _assert_greedy(asked: list[list[int]], answers: list[list[int]]) -> None:
    """Each answer is what the target alone says, wherever it is sure."""
    target = Target(trained_architecture(), {name: tensor.float() for name, tensor in shipped_weights().items()})
    for prompt, answer in zip(asked, answers, strict=True):
        with torch.no_grad():
            logits = target.forward(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2, dim=-1)
        sure = best.values[:, 0] - best.values[:, 1] >= 1e-3
        assert torch.equal(best.indices[sure, 0], torch.tensor(answer)[sure])
