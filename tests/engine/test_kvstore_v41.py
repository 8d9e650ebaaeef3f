"""V4.1's KV groups over the store.

Replay makes a hit differ from a cold run by design, so a hit in the store is compared with a hit of the same length in
the engine's own cache.
"""

from pathlib import Path

import pytest

from deepinfer_kvstore.chain import ChainHasher
from deepinfer_kvstore.hit import hit_tokens
from deepinfer_vllm.checkpoint.interface import Generation
from engine.harness import GOLDEN, golden_prompts, poison, preempt_all_every
from engine.kvstore import ask, engine_on, finish_stores, forget, tier_of

TINY = GOLDEN / "v41-tiny-a"
PROMPTS = [prompt.input_ids.tolist() for prompt in golden_prompts("v41-tiny-a")]
LONG = PROMPTS[5]  # 700 tokens


MAX_ABS = 1e-5
"""Of logits up to 17. With replay a hit in the engine writes its last window again, in products of another size."""


def assert_equal(found: Generation, expected: Generation) -> None:
    assert found.ids == expected.ids
    assert found.logits is not None and expected.logits is not None
    assert (found.logits - expected.logits).abs().max() <= MAX_ABS


@pytest.mark.parametrize(
    ("replay", "runner", "block_size"),
    [(False, "V1", 32), (True, "V2", 32), (True, "V1", 64), (False, "V1", 128)],
)
def test_a_hit_in_the_store_is_a_hit_in_the_engine(tmp_path: Path, replay: bool, runner: str, block_size: int) -> None:
    """vllm#42992, vllm#43142: block sizes and hash units; vllm#57661, vllm#53607: groups that share memory."""
    arguments = {"replay": replay, "runner": runner, "block_size": block_size, "kv_cache_memory_bytes": 64 << 20}
    blocks = 4 * block_size
    prompts = [PROMPTS[4], LONG, LONG[: blocks + 1], LONG[: blocks + 5]]
    with engine_on(TINY, tmp_path / "root", **arguments) as backend:
        poison(backend)
        for prompt in (*prompts, LONG[:blocks]):
            backend.generate(prompt, 12)
        own = [(backend.generate(prompt, 12), backend.cached_tokens(prompt)) for prompt in prompts]
        finish_stores(backend)
        assert tier_of(backend)._store.stats().stores > 0
    with engine_on(TINY, tmp_path / "root", **arguments) as backend:
        poison(backend)
        store = tier_of(backend)._store
        chain = ChainHasher(store.descriptor.hash_tokens, bytes.fromhex(store.descriptor.none_hash))
        for prompt, (answer, tokens) in zip(prompts, own, strict=True):
            predicted = hit_tokens(store.index, store.descriptor, chain.hashes(prompt), len(prompt))
            assert backend.cached_tokens(prompt) == tokens == predicted.tokens > 0
            forget(backend)
            assert_equal(backend.generate(prompt, 12), answer)
            forget(backend)
        stats = tier_of(backend)._store.stats()
        assert stats.hits > 0 and not stats.misses
        # Without replay vLLM loads the last block of whole blocks too, and computes one token of it; a replay starts
        # where a block does.
        assert backend.cached_tokens(LONG[:blocks]) == (blocks - block_size if replay else blocks - 1)


def test_chunks_preemption_and_batches(tmp_path: Path) -> None:
    """Exact without replay: whatever was loaded, computed and preempted, the answers are those of a cold engine."""
    prompts = [LONG, PROMPTS[4], PROMPTS[3], LONG[:420]]
    with engine_on(TINY, tmp_path / "root", kv_cache_memory_bytes=64 << 20) as backend:
        cold = [a.ids for a in backend.generate_many(prompts, 12, logits=False)]
    with engine_on(
        TINY, tmp_path / "root", kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=96, max_num_seqs=4
    ) as backend:
        poison(backend)
        preempt_all_every(backend, 5)
        for _ in range(2):
            assert [a.ids for a in backend.generate_many(prompts, 12, logits=False)] == cold
            forget(backend)
        assert tier_of(backend)._store.stats().hits > 0


def test_small_host_memory(tmp_path: Path) -> None:
    """vllm#54914: the window groups' rows come and go while loads and stores are under way."""
    prompts = [LONG, PROMPTS[4], LONG[:420]]
    with engine_on(TINY, tmp_path / "root", kv_cache_memory_bytes=64 << 20) as backend:
        cold = [a.ids for a in backend.generate_many(prompts, 8, logits=False)]
        finish_stores(backend)
    extra = {"cpu_bytes_to_use": 16 * 24576}
    with engine_on(TINY, tmp_path / "root", extra=extra, kv_cache_memory_bytes=64 << 20) as backend:
        poison(backend)
        for _ in range(3):
            assert [a.ids for a in backend.generate_many(prompts, 8, logits=False)] == cold
        finish_stores(backend)


def test_replay_on_and_off_share_nothing(tmp_path: Path) -> None:
    """An exact engine must not read what an approximating one has written."""
    for replay in (True, False):
        with engine_on(TINY, tmp_path / "root", replay=replay, kv_cache_memory_bytes=64 << 20) as backend:
            assert ask(backend, LONG)[1] == 0
            finish_stores(backend)
    assert len(list((tmp_path / "root").glob("*/meta.json"))) == 2
