"""Token ids of texts: cut pieces to train on, whole texts to measure on."""

from __future__ import annotations

from random import Random

import torch

from deepinfer_vllm.checkpoint.special_tokens import EOS
from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer, token_id
from deepinfer_vllm.training.texts import WORKLOADS, text


def tokens(vocab_size: int, workload: str, number: int, split: str) -> tuple[int, ...]:
    """Ids of one text and the end of text."""
    tokenizer = build_tokenizer(vocab_size)
    return (*tokenizer.encode(text(workload, number, split)).ids, token_id(tokenizer, EOS))


def training_batch(vocab_size: int, step: int, rows: int, length: int, seed: int) -> torch.Tensor:
    """[rows, length] ids, workloads in turn. A row begins at or before the start of a text, others follow.

    The same arguments give the same batch; another step has other texts.
    """
    rng, names = Random(f"{seed} {step}"), tuple(WORKLOADS)
    batch = []
    for row in range(rows):
        workload, ids = names[(step * rows + row) % len(names)], list[int]()
        start = rng.choice((0, 0, rng.randrange(256)))
        while len(ids) < start + length:
            ids += tokens(vocab_size, workload, rng.getrandbits(40), "train")
        batch.append(ids[start : start + length])
    return torch.tensor(batch)


def held_out_batch(vocab_size: int, workload: str, rows: int, length: int, first: int = 0) -> torch.Tensor:
    """[rows, length] ids of held-out texts from number `first` on, each from its start, shorter ones continued."""
    batch, number = [], first
    for _ in range(rows):
        ids = list[int]()
        while len(ids) < length:
            ids += tokens(vocab_size, workload, number, "held-out")
            number += 1
        batch.append(ids[:length])
    return torch.tensor(batch)
