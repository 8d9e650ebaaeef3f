"""The chunk scheduler and the store in one engine: what is loaded is priced as cached, answers are the golden ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer_vllm.scheduling import NAME
from engine.harness import GOLDEN, golden_prompts, poison, preempt_all_every, preemptions
from engine.kvstore import ask, engine_on, finish_stores, forget, tier_of
from engine.test_scheduling import assert_golden
from engine.test_scheduling_cost import Ends, small_chunks  # noqa: F401

TINY = GOLDEN / "v41-tiny-a"
PROMPTS = golden_prompts("v41-tiny-a")
IDS = [prompt.input_ids.tolist() for prompt in PROMPTS]
LONGEST = max(IDS, key=len)


class Starts:
    """Where chunks began that were priced, by the length of their prompt."""

    def __init__(self, scheduler: Any) -> None:
        self.by_length: dict[int, set[int]] = {}
        original = scheduler._chunk

        def chunk(request: Any, start: int, tokens: int) -> int:
            self.by_length.setdefault(request.num_prompt_tokens, set()).add(start)
            return int(original(request, start, tokens))

        scheduler._chunk = chunk


def test_hits_chunks_and_preemptions(tmp_path: Path) -> None:
    arguments = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 300}
    with engine_on(TINY, tmp_path / "root", scheduler_cls=NAME, **arguments) as backend:
        ends, starts = Ends(backend), Starts(backend.scheduler)
        poison(backend)
        assert_golden(backend.generate_many(IDS, 24), PROMPTS)
        assert len(ends.by_length[len(LONGEST)]) > 10 and 0 in starts.by_length[len(LONGEST)]
        for preempting in (False, True):
            forget(backend)
            starts.by_length.clear()
            if preempting:
                preempt_all_every(backend, 7)
                preempted = preemptions(backend)
            hits = tier_of(backend)._store.stats().hits
            assert_golden(backend.generate_many(IDS, 24), PROMPTS)
            assert tier_of(backend)._store.stats().hits > hits
            assert min(starts.by_length[len(LONGEST)]) == len(LONGEST) // 32 * 32  # all else was loaded
        assert len(preempted) >= 5
        assert all(end % 16 == 0 or end == length for length, of in ends.by_length.items() for end in of)
        costs = backend.scheduler._costs
        assert costs._fit.observations > 60 and costs.now != costs._fit.prior
        finish_stores(backend)
    with engine_on(TINY, tmp_path / "root", **arguments) as backend:  # vLLM's own loads what chunks have left there
        for ids, prompt in zip(IDS, PROMPTS, strict=True):
            cached = (
                len(ids) - 1 if len(ids) % 32 == 0 else len(ids) // 32 * 32
            )  # of whole blocks one token is computed
            assert ask(backend, ids, 24) == (prompt.gen_ids.tolist(), cached)
