"""VLLM_BATCH_INVARIANT=1 over two tensor-parallel ranks, with logprobs of what is sampled from."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.invariant import CHUNKS, KINDS, SMALL, Case, alone, preempting, requests, switched_on
from engine.kvstore import engine_on, forget, tier_of
from engine.sampling_kinds import kinds


def test_tensor_parallel(trained_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, in chunks, among hits in the store and preempted; without drafts and with them."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM would bind each process to a NUMA node of its own
    wanted = None
    for kind in ("V2", "DSpark"):
        options = {**SMALL, **KINDS[kind], "skip_tokenizer_init": False, "logprobs_mode": "processed_logprobs"}
        with switched_on(), engine_on(trained_pair, tmp_path / kind, tensor_parallel_size=2, **options) as backend:
            asked = requests() + kinds(drafts=True)
            wanted = wanted or alone(backend, asked, "first")
            case = Case(kind, backend, asked, wanted)
            for chunk in CHUNKS[:2]:
                case.scheduled(chunk)
                case.check_together(f"together {chunk}", "anew")
            forget(backend)
            hits = tier_of(backend)._store.stats().hits
            with preempting(backend, 9):
                case.check_together(f"together {CHUNKS[1]}", "store")
            assert tier_of(backend)._store.stats().hits > hits
