"""VLLM_BATCH_INVARIANT=1 behind `vllm serve`: the bits of an answer over HTTP, alone and among others, after a restart
with other chunks and with drafts, and of experts shared by two data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, ServerProcess
from deepinfer_vllm.training.texts import text
from engine.invariant import texts

START_LIMIT_SECONDS = 600
DRAFTS = ("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5}')
RANKS = ("--data-parallel-size", "2", "--api-server-count", "1", "--enable-expert-parallel")
CHUNKS = ("--max-num-batched-tokens", "64")
STARTS: dict[str, list[tuple[str, ...]]] = {"V1": [(), CHUNKS], "V2": [(), (*CHUNKS, *DRAFTS)], "V2 ranks": [RANKS]}
"""By runner, flags of one server after the other: all give the same answers."""

Answer = list[tuple[Any, Any, Any]]
"""Of each choice tokens, their logprobs, and what is listed beside them."""


@contextmanager
def served(checkpoint: Path, log: Path, runner: str, flags: Sequence[str]) -> Iterator[httpx.Client]:
    """With the engine in a process of its own, as by default, and decoder-side replay asked for, as by default."""
    environment = {
        **SMALL_CPU_ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner != "V1")),
        "DEEPINFER_VLLM_DECODER_REPLAY": "1",
    }
    flags = (*SMALL_CPU_FLAGS, "--max-model-len", "448", "--max-num-seqs", "8", "--served-model-name", "pair", *flags)
    with ServerProcess(checkpoint, log, flags, environment) as process:
        process.wait_until_healthy(START_LIMIT_SECONDS)
        with httpx.Client(base_url=process.url, timeout=300) as http:
            yield http


def bodies() -> list[dict[str, Any]]:
    fixed = {"max_tokens": 24, "ignore_eos": True, "temperature": 0, "logprobs": 2}
    short, records, prose, lists = texts()
    return [
        {"prompt": prompt, **fixed, **given}
        for prompt, given in (
            (short, {}),
            (lists, {}),
            (prose, {"temperature": 0.8, "seed": 1}),
            (records, {"temperature": 1.0, "seed": 2, "top_p": 0.9, "n": 2}),
            (lists, {"temperature": 0.9, "seed": 3, "presence_penalty": 0.5}),
        )
    ]


def crowd() -> list[dict[str, Any]]:
    """Who else is there: prompts of many lengths, drawn without a seed."""
    lengths = [7 + 40 * number for number in range(7)]
    return [
        {"prompt": text("prose", 900)[length : 2 * length], "max_tokens": 40, "temperature": 1} for length in lengths
    ]


def answer(http: httpx.Client, body: dict[str, Any]) -> Answer:
    more = {"model": "pair", "return_token_ids": True, "return_tokens_as_token_ids": True}
    reply = http.post("/v1/completions", json={**body, **more})
    assert reply.status_code == 200, reply.text
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    listed = [c["logprobs"] or {} for c in choices]
    return [
        (c["token_ids"], of.get("token_logprobs"), of.get("top_logprobs"))
        for c, of in zip(choices, listed, strict=True)
    ]


@pytest.mark.parametrize("name", STARTS)
def test_alone_and_among_others_and_after_a_restart(trained_pair: Path, tmp_path: Path, name: str) -> None:
    """Floats in JSON are written so that they are read as the same bits."""
    wanted: list[Answer] = []
    for number, flags in enumerate(STARTS[name]):
        log = tmp_path / f"{number}.log"
        with served(trained_pair, log, name[:2], flags) as http:
            alone = [answer(http, body) for body in bodies()]
            wanted = wanted or alone
            assert alone == wanted
            asked = [body for pair in zip(crowd(), bodies() * 2, strict=False) for body in pair]
            with ThreadPoolExecutor(len(asked)) as pool:
                found = list(pool.map(lambda body: answer(http, body), asked))
            assert found[1::2] == (wanted * 2)[: len(crowd())]
        assert f"model runner {name[:2]}, decoder replay off, invariant" in log.read_text()
