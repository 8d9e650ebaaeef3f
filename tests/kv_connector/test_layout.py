"""Namespaces and schema ids from vLLM's own configuration objects: two engines share blocks only if all is equal."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)

from deepinfer_kvstore.descriptor import Descriptor
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_vllm.kv_connector import CONNECTOR
from deepinfer_vllm.kv_connector.layout import describe, schemas

KV = {
    "kv_connector": CONNECTOR,
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"root": ".", "capacity_bytes": 1 << 40},
}
ATTENTION: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
LATENT: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """engine_config(**engine_args): vLLM's configuration of a tiny llama."""
    from vllm.engine.arg_utils import EngineArgs

    from engine.llama import write_llama

    path = str(write_llama(tmp_path_factory.mktemp("model") / "llama"))

    def make(**args: Any) -> Any:
        config = EngineArgs(model=path, kv_transfer_config=KV, **{"dtype": "float32", **args}).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        return config

    return make


def caches(*specs: KVCacheSpec, blocks: int = 100) -> KVCacheConfig:
    """One group a spec, of two layers each, in the order given; layer numbers follow the specs' sizes."""
    groups = [KVCacheGroupSpec([f"layers.{10 * i + j}.attn" for j in range(2)], spec) for i, spec in enumerate(specs)]
    row = max(2 * spec.page_size_bytes for spec in specs)
    tensors = [
        KVCacheTensor(row * blocks, group.layer_names, group.kv_cache_spec.page_size_bytes * blocks, row)
        for group in groups
    ]
    return KVCacheConfig(blocks, tensors, groups)


def namespace(config: Any, kv_caches: KVCacheConfig, **change: Any) -> Descriptor:
    return describe(config, kv_caches, replace(build_offloading_config(config, kv_caches), **change))[0]


def test_a_namespace_does_not_depend_on_the_size_of_memory(engine_config: Callable[..., Any]) -> None:
    spec = FullAttentionSpec(block_size=32, **ATTENTION)
    one = namespace(engine_config(block_size=32), caches(spec))
    other = namespace(engine_config(block_size=32, max_num_seqs=3, max_model_len=512), caches(spec, blocks=77))
    assert one == other
    assert one.hash_tokens == one.groups[0].tokens_per_block == 32
    assert one.payload_bytes == 2 * spec.page_size_bytes == 2 * 32 * 2 * 64 * 4
    assert one.groups[0].window_tokens is None and one.groups[0].schema == 256


def test_what_changes_bytes_changes_the_namespace(engine_config: Callable[..., Any]) -> None:
    """sglang#33268, lmdeploy#4930"""
    spec = FullAttentionSpec(block_size=32, **ATTENTION)
    plain = engine_config(block_size=32)
    offloading = build_offloading_config(plain, caches(spec))
    found = [
        namespace(plain, caches(spec)),
        namespace(engine_config(block_size=32, dtype="bfloat16"), caches(replace(spec, dtype=torch.bfloat16))),
        namespace(engine_config(block_size=64), caches(replace(spec, block_size=64))),
        namespace(engine_config(block_size=32, hf_overrides={"rope_theta": 5e5}), caches(spec)),
        namespace(plain, caches(replace(spec, num_kv_heads=4))),
        namespace(plain, caches(spec, replace(spec, head_size=16))),
        describe(plain, caches(spec), offloading, weights="v2")[0],
        namespace(plain, caches(spec), kv_cache_layout="LBNHC"),
        namespace(
            plain, caches(spec), parallel=replace(build_offloading_config(plain, caches(spec)).parallel, tp_size=2)
        ),
        namespace(
            plain, caches(spec), cache=replace(build_offloading_config(plain, caches(spec)).cache, blocks_per_chunk=2)
        ),
    ]
    assert len({descriptor.digest() for descriptor in found}) == len(found)


def test_python_hash_seed_is_part_of_the_namespace(
    engine_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache#1139: other roots of the chain must not be looked for in vain."""
    config, kv = engine_config(block_size=32), caches(FullAttentionSpec(block_size=32, **ATTENTION))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    default = namespace(config, kv)
    assert default.none_hash == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert namespace(config, kv).none_hash != default.none_hash


def test_every_field_of_a_descriptor_is_in_its_digest(engine_config: Callable[..., Any]) -> None:
    descriptor = namespace(engine_config(block_size=32), caches(FullAttentionSpec(block_size=32, **ATTENTION)))
    group = descriptor.groups[0]
    flips = [
        replace(descriptor, **{field.name: getattr(descriptor, field.name) + type(getattr(descriptor, field.name))(1)})
        for field in fields(Descriptor)
        if field.name != "groups"
    ]
    flips += [replace(descriptor, groups=(replace(group, **{name: 1}),)) for name in (f.name for f in fields(group))]
    assert len({flip.digest() for flip in (descriptor, *flips)}) == len(flips) + 1


def test_schema_ids_do_not_move_with_the_groups() -> None:
    window = SlidingWindowMLASpec(block_size=32, sliding_window=16, **LATENT)
    full = MLAAttentionSpec(block_size=32, **LATENT)
    config = caches(window, full, full, window)
    ids = schemas(config, (0, 1, 2, 3))
    assert ids == {0: 4 * 256, 1: 3 * 256, 2: 3 * 256 + 1, 3: 4 * 256 + 1}
    config.kv_cache_groups.reverse()
    assert schemas(config, (0, 1, 2, 3)) == {3 - group: schema for group, schema in ids.items()}
    assert schemas(config, (1, 2)) == {1: 3 * 256 + 1, 2: 3 * 256}


def test_windows_are_those_that_vllm_looks_for(engine_config: Callable[..., Any]) -> None:
    window = SlidingWindowMLASpec(block_size=32, sliding_window=16, **LATENT)
    full = MLAAttentionSpec(block_size=32, tokens_per_state=2, **LATENT)
    descriptor = namespace(engine_config(block_size=32), caches(window, full))
    assert [(group.schema, group.window_tokens) for group in descriptor.groups] == [(768, None), (1024, 16)]
    kept = namespace(engine_config(block_size=32), caches(replace(window, extra_retained_tokens=20), full))
    assert kept.groups[1].window_tokens == 36


def test_unknown_layouts_are_refused_by_name(engine_config: Callable[..., Any]) -> None:
    """LMCache#4463: bytes of a layout nobody has looked at are not stored."""
    sink = SinkFullAttentionSpec(block_size=32, sink_len=4, **ATTENTION)
    with pytest.raises(StoreConfigError, match=r"of layers\.0\.attn holds a SinkFullAttentionSpec, .* knows \["):
        schemas(caches(sink), (0,))
    packed = MLAAttentionSpec(block_size=32, cache_dtype_str="turboquant_k8v4", **LATENT)
    with pytest.raises(StoreConfigError, match="holds records of format 'turboquant_k8v4'"):
        schemas(caches(packed), (0,))
    with pytest.raises(StoreConfigError, match="KV memory of layout 'BHLNC' is unknown"):
        namespace(engine_config(block_size=32), caches(replace(packed, cache_dtype_str=None)), kv_cache_layout="BHLNC")


def test_a_latent_block_is_one_vector_a_token(engine_config: Callable[..., Any]) -> None:
    """vllm#44376: sized as heads with keys and values, it was of another length than what the engine copies."""
    heads = FullAttentionSpec(block_size=32, **ATTENTION)
    latent = MLAAttentionSpec(block_size=32, **LATENT)
    assert [group.payload_bytes for group in namespace(engine_config(block_size=32), caches(heads)).groups] == [
        2 * 32 * 2 * 2 * 32 * 4  # layers, tokens, keys and values, heads, head size, float32
    ]
    assert [group.payload_bytes for group in namespace(engine_config(block_size=32), caches(latent)).groups] == [
        2 * 32 * 64 * 4  # layers, tokens, head size, float32
    ]


def test_host_memory_for_less_than_a_few_blocks_is_refused(engine_config: Callable[..., Any]) -> None:
    from deepinfer_vllm.kv_connector.spec import StoreOffloadingSpec

    config, kv = engine_config(block_size=32), caches(FullAttentionSpec(block_size=32, **ATTENTION))
    offloading = build_offloading_config(config, kv)
    small = replace(offloading, extra_config={**offloading.extra_config, "cpu_bytes_to_use": 3 * 32768})
    with pytest.raises(StoreConfigError, match="cpu_bytes_to_use is 98304, a block takes 32768: at least 4 must fit"):
        StoreOffloadingSpec(small)
