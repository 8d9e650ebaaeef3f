"""What the store is told of an engine's KV blocks: record formats, schema ids, and the descriptor of its namespace.

The one place that knows kinds of KV cache. What is not in its tables is refused by name: bytes of a layout that nobody
has looked at must not be taken for another's (LMCache#4463).
"""

import hashlib
import platform
import re
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_offload.config import OffloadingConfig

from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_vllm import envs
from deepinfer_vllm.kv_connector.weights_digest import config_digest, weights_digest
from deepinfer_vllm.models import uses_portable_model
from deepinfer_vllm.native import invariance

KINDS = {
    "FullAttentionSpec": 1,
    "SlidingWindowSpec": 2,
    "MLAAttentionSpec": 3,
    "SlidingWindowMLASpec": 4,
}
"""Numbers of vLLM's kinds of cache, by the class of their spec."""
RECORDS = {
    *("float32", "float16", "bfloat16", "int32", "uint8"),  # plain rows
    *("fp8", "fp8_e4m3", "fp8_e5m2"),
    *(
        "fp8_ds_mla",
        "nvfp4_ds_mla",
    ),  # packed rows of V4 and V4.1: 528, 584 or 288 bytes, and index rows of 68 or 132
}
LAYOUTS = {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
"""Orders of vLLM's KV memory: layers, blocks, heads, states, content."""
SCHEMAS_PER_KIND = 256


def schemas(kv_cache_config: Any, group_ids: tuple[int, ...]) -> dict[int, int]:
    """Schema ids by the index of vLLM's group: the kind, and the number of the group among those of its kind.

    Raises:
        StoreConfigError: a group is of an unknown kind or record format.
    """
    found: dict[int, int] = {}
    taken = dict.fromkeys(KINDS, 0)
    for group_id in sorted(group_ids, key=lambda i: _natural(kv_cache_config.kv_cache_groups[i].layer_names[0])):
        group = kv_cache_config.kv_cache_groups[group_id]
        kind = type(group.kv_cache_spec).__name__
        if kind not in KINDS:
            _refuse(group, f"a {kind}", KINDS)
        if (record := record_format(group.kv_cache_spec)) not in RECORDS:
            _refuse(group, f"records of format {record!r}", RECORDS)
        found[group_id] = KINDS[kind] * SCHEMAS_PER_KIND + taken[kind]
        taken[kind] += 1
    return found


def record_format(spec: Any) -> str:
    """Name of the format of a cache's rows."""
    name = getattr(spec, "cache_dtype_str", None)
    return str(spec.dtype).removeprefix("torch.") if name in (None, "auto") else str(name)


def describe(
    vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, *, weights: str | None = None
) -> tuple[Descriptor, dict[int, int]]:
    """The namespace of an engine's blocks, and its schema ids by vLLM's group. On the scheduler's side only: ranks see
    other specs. `weights`: the user's name for the weights.

    Raises:
        StoreConfigError: something in the engine's KV memory is unknown here.
    """
    model, parallel = vllm_config.model_config, config.parallel
    ids = schemas(kv_cache_config, tuple(group.group_id for group in config.groups))
    specs = {group_id: kv_cache_config.kv_cache_groups[group_id].kv_cache_spec for group_id in ids}
    if config.kv_cache_layout not in LAYOUTS:
        raise StoreConfigError(f"KV memory of layout {config.kv_cache_layout!r} is unknown: one of {sorted(LAYOUTS)}")
    copies = 1 if config.replicated_layout else parallel.world_size
    row_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk * copies
    groups = tuple(
        Group(
            schema=ids[group.group_id],
            tokens_per_block=group.tokens_per_block * config.cache.blocks_per_chunk,
            payload_bytes=row_bytes,
            window_tokens=_window(specs[group.group_id]),
            draft=kv_cache_config.kv_cache_groups[group.group_id].is_eagle_group,
        )
        for group in sorted(config.groups, key=lambda group: ids[group.group_id])
    )
    hash_name = vllm_config.cache_config.prefix_caching_hash_algo
    hash_function = get_hash_fn_by_name(hash_name)
    return Descriptor(
        model=f"{'/'.join(model.architectures)}:{config_digest(vllm_config)}",
        weights=weights if weights is not None else weights_digest(model),
        kv_dtype=f"{config.model.dtype} of {str(model.dtype).removeprefix('torch.')}",
        record_format=" ".join([*(record_format(specs[i]) for i in sorted(ids, key=ids.__getitem__)), _writer(model)]),
        layout=_layout_digest(kv_cache_config, ids, config.kv_cache_layout),
        hash_algorithm=hash_name,
        none_hash=hash_function(resolve_none_hash_seed(hash_function)).hex(),
        hash_tokens=config.cache.tokens_per_hash,
        shards="replicated"
        if config.replicated_layout
        else f"tp{parallel.tp_size} pp{parallel.pp_size} pcp{parallel.pcp_size} dcp{parallel.dcp_size}",
        groups=groups,
        replays=any(group.kv_cache_spec.prefix_replay_tokens > 0 for group in kv_cache_config.kv_cache_groups),
    ), ids


def _window(spec: Any) -> int | None:
    """Tokens back from the end of a hit whose rows vLLM looks for and keeps; None: all."""
    window: int | None = getattr(spec, "sliding_window", None) if "SlidingWindow" in type(spec).__name__ else None
    return window if window is None else window + int(spec.extra_retained_tokens)


def _writer(model: Any) -> str:
    """Who writes the records, as far as their bytes depend on it and specs do not say it."""
    parts = [f"vllm{'.'.join(vllm.__version__.split('.')[:2])}", current_platform.device_type]
    if current_platform.is_cpu():  # vLLM packs keys by what the CPU can do
        amx = "amx" if torch.cpu._is_amx_tile_supported() else "no-amx"
        parts += [platform.machine(), torch.backends.cpu.get_cpu_capability(), amx]
    elif (capability := current_platform.get_device_capability()) is not None:
        parts.append(str(capability.major))
    if uses_portable_model() and "DeepseekV41ForCausalLM" in model.architectures:
        parts += ["portable", envs.DEEPINFER_VLLM_NUMERICS]
        parts += [name for name in [invariance.way().value] if name]
    return "-".join(parts)


def _layout_digest(kv_cache_config: Any, ids: dict[int, int], layout: str) -> str:
    """Digest of the names, shapes and order of what a block holds; of nothing that moves with the number of blocks."""
    lines = [layout]
    for group_id in sorted(ids, key=ids.__getitem__):
        group = kv_cache_config.kv_cache_groups[group_id]
        lines.append(f"{ids[group_id]} {group.kv_cache_spec!r} {group.is_eagle_group} {group.layer_names}")
    for tensor in kv_cache_config.kv_cache_tensors:
        packed = tensor.layer_stride < tensor.block_stride
        lines.append(f"{tensor.layers} {(tensor.offset, tensor.layer_stride, tensor.block_stride) if packed else None}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _natural(name: str) -> list[tuple[int, str]]:
    """Layers in the order of their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _refuse(group: Any, what: str, known: Any) -> None:
    raise StoreConfigError(
        f"the KV group of {group.layer_names[0]} holds {what}, which the store does not know: it knows {sorted(known)}"
    )
