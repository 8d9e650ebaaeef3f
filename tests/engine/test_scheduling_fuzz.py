"""Seeded random engines and requests. Every answer is the reference's: with replay, the truncated reference's.

Caches start as NaN. Requests share prefixes, come while others run, ask for several samples and for logprobs, are
aborted, and are preempted at random steps.
"""

from __future__ import annotations

import random
import time
from functools import cache
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint.backends import EngineBackend
from engine.harness import GOLDEN, Engine, poison
from reference import load
from reference.model import Reference

NAME, WINDOW, VOCABULARY, LONGEST = "v41-tiny-a", 16, 512, 160
MAX_ABS = 3e-4


@cache
def reference() -> Reference:
    return load(GOLDEN / NAME)


class Cuts:
    """What the scheduler gave each request in each step, and from it what replay must have left out."""

    def __init__(self, backend: EngineBackend) -> None:
        self.parts: dict[str, list[tuple[int, int, bool]]] = {}  # first position, tokens, whether it (re)starts here
        original = backend.scheduler.schedule

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
            for new in output.scheduled_new_reqs:
                self.parts.setdefault(new.req_id, []).append((new.num_computed_tokens, counts[new.req_id], True))
            for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self.parts[name].append((start, counts[name], name in cached.resumed_req_ids))
            return output

        backend.scheduler.schedule = recorded

    def replayed_from(self, name: str, prompt_tokens: int, token: int, keeps_all: bool) -> list[int]:
        """Where the reference must truncate for an answer's token; several if a preemption had it drawn again."""
        found, kept_from = [], 0
        for start, count, restarts in self.parts[name]:
            kept_from = start if restarts else kept_from
            if count > WINDOW and not keeps_all:
                kept_from = start + count - WINDOW
            if start + count == prompt_tokens + token:
                found.append(kept_from)
        return found


def make_request(rng: random.Random, bases: list[list[int]], block: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt, often with a shared prefix and of a length at some boundary, and sampling parameters."""
    edges = [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, block, block + 1, 2 * block, WINDOW + block]
    length = min(rng.choice([*edges, rng.randint(1, LONGEST)]), LONGEST)
    shared = rng.choice([0, length, length // block * block, rng.randint(0, length)])
    prompt = rng.choice(bases)[:shared] + [rng.randrange(VOCABULARY) for _ in range(length - shared)]
    wanted: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 8, WINDOW + 2, 40]), "logprobs": 2, "temperature": 0.0}
    if rng.random() < 0.3:
        wanted |= {"n": 2, "temperature": 1.0, "seed": rng.randrange(99)}
    if rng.random() < 0.2:
        wanted["prompt_logprobs"] = 1
    return prompt, wanted


def drive(
    backend: EngineBackend, rng: random.Random, requests: list[tuple[list[int], dict[str, Any]]]
) -> dict[str, Any]:
    """Outputs of the requests that were not aborted, by name."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, scheduler = backend._llm.llm_engine, backend.scheduler
    waiting, done, live = list(enumerate(requests)), {}, set()
    while waiting or engine.has_unfinished_requests():
        while waiting and (rng.random() < 0.5 or not live):
            number, (prompt, wanted) = waiting.pop(0)
            fixed = {"output_kind": RequestOutputKind.FINAL_ONLY, "ignore_eos": True, "detokenize": False}
            engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, SamplingParams(**wanted, **fixed))
            live.add(f"r{number}")
        if live and rng.random() < 0.02:
            engine.abort_request([name := rng.choice(sorted(live))])
            live.discard(name)
        if scheduler.running and rng.random() < 0.1:
            for _ in range(rng.randint(1, len(scheduler.running))):
                scheduler._preempt_request(scheduler.running.pop(), time.monotonic(), drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.clear()
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
                live.discard(output.request_id)
    return done


def assert_reference(answer: Any, prompt: list[int], cuts: list[list[int]]) -> None:
    """Each token's logprobs are the reference's for one of its cuts."""
    ids = prompt + list(answer.token_ids)[:-1]

    @cache
    def logprobs(cut: int) -> torch.Tensor:
        return torch.log_softmax(reference().forward(ids, replay_from=cut).logits, dim=-1)

    for token, (row, possible) in enumerate(zip(answer.logprobs, cuts, strict=True)):
        got = torch.tensor([value.logprob for value in row.values()], dtype=torch.float64)
        want = [logprobs(cut)[len(prompt) - 1 + token][list(row)] for cut in possible]
        assert any((got - w).abs().max() <= MAX_ABS for w in want), (token, possible)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_schedule(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    replay, block, seqs = bool(seed % 2), rng.choice([2, 6, 16, 24]), rng.choice([1, 3, 8])
    chunk = rng.choice([17, 40, 100, 512])
    sizes = {"block_size": block, "max_num_batched_tokens": chunk, "max_num_seqs": seqs, "max_model_len": 256}
    bases = [[rng.randrange(VOCABULARY) for _ in range(LONGEST)] for _ in range(2)]
    requests = [make_request(rng, bases, block) for _ in range(10)]
    with engine(NAME, replay=replay, logprobs_mode="raw_logprobs", **sizes) as backend:
        poison(backend)
        cuts = Cuts(backend)
        done = drive(backend, rng, requests)
        pool = backend.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert len(done) >= 7
    for number, (prompt, wanted) in enumerate(requests):
        for answer in done[f"r{number}"].outputs if f"r{number}" in done else ():
            stem = f"r{number}-" if wanted.get("n", 1) == 1 else f"{answer.index}_r{number}-"
            (name,) = (name for name in cuts.parts if name.startswith(stem))
            keeps_all = "prompt_logprobs" in wanted
            tokens = range(len(answer.token_ids))
            found = [cuts.replayed_from(name, len(prompt), t, keeps_all) if replay else [0] for t in tokens]
            assert_reference(answer, prompt, found)
