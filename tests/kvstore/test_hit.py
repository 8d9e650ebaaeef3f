"""What CHECK says against what vLLM's OffloadingConnector finds with the same blocks there."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.hit import NO_HIT, hit_tokens
from deepinfer_kvstore.keys import Key, make_key

ENTRY = Entry(Location(0, 0, 0, 0), 100, bytes(8), 0, 0, 0, 0, 0)
FULL_BYTES, WINDOW_BYTES = 100, 7


class Keys:
    """An index of some keys."""

    def __init__(self, keys: set[Key]) -> None:
        self.keys = keys

    def get_many(self, keys: Sequence[Key]) -> list[Entry | None]:
        return [ENTRY if key in self.keys else None for key in keys]

    def longest_prefix(self, keys: Sequence[Key]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.keys), len(keys))


def descriptor(hash_tokens: int, *groups: Group) -> Descriptor:
    return Descriptor("m", "w", "d", "r", "l", "sha256_cbor", "00" * 32, hash_tokens, "s", groups)


def block_hashes(count: int) -> list[bytes]:
    return [hashlib.sha256(bytes([number])).digest() for number in range(count)]


def full(tokens: int, schema: int = 0, draft: bool = False) -> Group:
    return Group(schema, tokens, FULL_BYTES, draft=draft)


def window(tokens: int, width: int, schema: int = 1, draft: bool = False) -> Group:
    return Group(schema, tokens, WINDOW_BYTES, width, draft)


def test_full_group_counts_leading_blocks() -> None:
    names = block_hashes(6)
    keys = [make_key(3, name) for name in names]
    what = descriptor(16, full(16, schema=3))
    for there in range(7):
        hit = hit_tokens(Keys(set(keys[:there])), what, names, 100)
        assert (hit.tokens, hit.bytes, hit.keys) == (16 * there, FULL_BYTES * there, keys[:there])
    assert hit_tokens(Keys({*keys[:2], *keys[3:]}), what, names, 100).tokens == 32
    assert hit_tokens(Keys({make_key(4, name) for name in names}), what, names, 100) == NO_HIT


def test_the_whole_prompt_is_a_hit_with_and_without_windows() -> None:
    names = block_hashes(4)
    everything = Keys({make_key(schema, name) for schema in (0, 1) for name in names})
    assert hit_tokens(everything, descriptor(16, full(16)), names, 64).tokens == 64
    hit = hit_tokens(everything, descriptor(16, full(16), window(16, 20)), names, 64)
    assert hit.tokens == 64
    assert hit.keys == [*(make_key(0, name) for name in names), *(make_key(1, name) for name in names[-2:])]
    assert hit.bytes == 4 * FULL_BYTES + 2 * WINDOW_BYTES


def test_who_replays_loads_whole_blocks_before_the_last_token() -> None:
    names = block_hashes(8)
    everything = Keys({make_key(schema, name) for schema in (0, 1) for name in names})
    replaying = replace(descriptor(16, full(16), window(32, 20)), replays=True)
    for tokens, expected in ((128, 96), (129, 128), (127, 96), (64, 32), (33, 32), (32, 0)):
        assert hit_tokens(everything, replaying, names[: tokens // 16], tokens).tokens == expected
    assert hit_tokens(everything, replace(replaying, groups=(full(16),)), names, 128).tokens == 128


def test_a_window_that_is_nowhere_whole_means_no_hit() -> None:
    """# vllm#52735: much stored, nothing read. Here the answer must be as small as what will be read."""
    names = block_hashes(8)
    all_full = {make_key(0, name) for name in names}
    what = descriptor(16, full(16), window(16, 32))
    assert hit_tokens(Keys(all_full | {make_key(1, names[5])}), what, names, 130) == NO_HIT
    assert hit_tokens(Keys(all_full | {make_key(1, name) for name in names[2:4]}), what, names, 130).tokens == 64


def test_short_and_empty_prompts() -> None:
    what = descriptor(16, full(16), window(16, 16))
    assert hit_tokens(Keys(set()), what, [], 0) == NO_HIT
    assert hit_tokens(Keys(set()), what, [], 15) == NO_HIT


UNIT = 4
lengths = st.one_of(st.integers(0, 130), st.integers(1, 8).map(lambda blocks: UNIT * blocks))
shapes = st.lists(
    st.one_of(
        st.builds(full, st.sampled_from([4, 8, 16]), draft=st.booleans()),
        st.builds(window, st.sampled_from([4, 8, 16]), st.integers(1, 40), draft=st.booleans()),
    ),
    min_size=1,
    max_size=4,
)


def vllm_hit(groups: list[Group], names: list[bytes], tokens: int, keys: set[Key]) -> int:
    """The same question put to vLLM's scheduler part."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as module
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    configs = []
    for number, group in enumerate(groups):
        shape: dict[str, Any] = {
            "block_size": group.tokens_per_block,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": torch.float32,
        }
        spec = (
            FullAttentionSpec(**shape)
            if group.window_tokens is None
            else SlidingWindowSpec(**shape, sliding_window=group.window_tokens)
        )
        configs.append(
            module.GroupOffloadConfig(
                group_idx=number,
                tokens_per_block=group.tokens_per_block,
                tokens_per_chunk=group.tokens_per_block,
                hashes_per_chunk=group.tokens_per_block // UNIT,
                kv_event_group_spec=None,
                sliding_window_size_in_chunks=module.get_sliding_window_size_in_chunks(spec, group.tokens_per_block),
                kv_cache_spec=spec,
                manager_cls=None,
                is_eagle_group=group.draft,
            )
        )
    scheduler = object.__new__(module.OffloadingConnectorScheduler)
    scheduler.config = module.SchedulerOffloadConfig(
        kv_group_configs=tuple(configs),
        blocks_per_chunk=1,
        tokens_per_hash=UNIT,
        num_workers=1,
        offload_prompt_only=False,
        supports_partial_tail=False,
    )
    wide = [number for number, group in enumerate(groups) if group.window_tokens is None]
    narrow = [number for number, group in enumerate(groups) if group.window_tokens is not None]
    narrow.sort(key=lambda number: configs[number].sliding_window_size_in_chunks, reverse=True)
    scheduler._sliding_window_groups = tuple(narrow)
    scheduler._lookup_groups = tuple(wide + narrow)
    scheduler._mamba_align_size = None
    scheduler._chunks_being_loaded = None
    scheduler._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)

    def lookup(key: bytes, _: object) -> LookupResult:
        schema = groups[int.from_bytes(key[-4:], "big")].schema
        return LookupResult.HIT if make_key(schema, key[:-4]) in keys else LookupResult.MISS

    scheduler.manager = SimpleNamespace(lookup=lookup)
    request = SimpleNamespace(request_id="r", num_tokens=tokens, block_hashes=names, kv_transfer_params=None)
    status = module.RequestOffloadState(scheduler.config, request, ReqContext(req_id="r"), None)
    status.update_offload_keys()
    found = scheduler._lookup(status)
    assert found is not None
    return found


@pytest.mark.vllm
@given(shapes, lengths, st.randoms(use_true_random=False), st.sampled_from([0.6, 0.8, 0.95, 1.0]))
@settings(max_examples=4000)
def test_equal_to_what_vllm_finds(groups: list[Group], tokens: int, rng: Any, density: float) -> None:
    groups = [
        Group(number, group.tokens_per_block, group.payload_bytes, group.window_tokens, group.draft)
        for number, group in enumerate(groups)
    ]
    names = block_hashes(tokens // UNIT)
    keys = {make_key(group.schema, name) for group in groups for name in names if rng.random() < density}
    hit = hit_tokens(Keys(keys), descriptor(UNIT, *groups), names, tokens)
    theirs = vllm_hit(groups, names, tokens, keys)
    if theirs == tokens - 1 and tokens % UNIT == 0:
        assert hit.tokens == tokens
    else:
        assert hit.tokens == theirs
    assert hit.tokens % UNIT == 0
    assert set(hit.keys) <= keys
