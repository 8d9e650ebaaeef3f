"""Texts and batches: the same for the same number, other ones for training and for measuring."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer
from deepinfer_vllm.training.architecture import TRAINED
from deepinfer_vllm.training.batches import held_out_batch, tokens, training_batch
from deepinfer_vllm.training.texts import WORKLOADS, text

VOCABULARY = TRAINED.vocab_size


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_text_follows_from_its_number(workload: str) -> None:
    texts = [text(workload, number, split) for split in ("train", "held-out") for number in range(50)]
    assert len(set(texts)) == 100
    assert all(350 <= len(t) <= 1500 and t.isascii() and t.endswith("\n") for t in texts)
    command = f"from deepinfer_vllm.training.texts import text; print(text({workload!r}, 7), end='')"
    again = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout
    assert again == texts[57]


def test_rules_hold() -> None:
    """What a model can learn from these texts is true of them."""
    for number in range(20):
        lines = text("sums", number).splitlines()[1:-1]
        parts = [re.fullmatch(r"(\d+) ([+-]) (\d) = (\d+)", line) for line in lines]
        assert all(parts)
        for part in parts:
            assert part is not None
            a, b, result = (int(part[i]) for i in (1, 3, 4))
            assert result == (a + b if part[2] == "+" else a - b)
        first, second, backwards = (text("lists", number).splitlines()[i : i + 8] for i in (1, 10, 19))
        assert first == second == backwards[::-1]


def test_batches() -> None:
    batch = training_batch(VOCABULARY, 3, 6, 200, seed=0)
    assert batch.shape == (6, 200) and int(batch.max()) < VOCABULARY
    assert torch.equal(batch, training_batch(VOCABULARY, 3, 6, 200, seed=0))
    assert not torch.equal(batch, training_batch(VOCABULARY, 4, 6, 200, seed=0))
    assert not torch.equal(batch, training_batch(VOCABULARY, 3, 6, 200, seed=1))
    held = held_out_batch(VOCABULARY, "code", 2, 700)
    assert held[0, : len(first := tokens(VOCABULARY, "code", 0, "held-out"))].tolist() == list(first)
    assert build_tokenizer(VOCABULARY).decode(first[:-1]) == text("code", 0)
