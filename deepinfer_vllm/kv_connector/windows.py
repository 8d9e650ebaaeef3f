"""The sliding windows that a prefix hit computes again, and their rows on the way to and from a snapshot.

vLLM keeps the blocks of such windows out of its prefix cache and out of a store: they are large and needed only where a
sequence goes on. A snapshot is all of them at one position, `boundary`: for each group, each layer and each block of
the window before it, the block's bytes, in that order.
"""

import hashlib
from dataclasses import dataclass, field
from math import lcm
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs, group_kernel_blocks

logger = init_logger("vllm." + __name__)

Blocks = tuple[tuple[int, ...], ...]
"""Ids of the blocks of a window, by group."""


class WindowGroup(NamedTuple):
    """A group of layers with one window."""

    group: int
    window_tokens: int
    block_tokens: int
    layers: tuple[tuple[str, int], ...]
    """Name of each layer, and the bytes of one of its blocks."""

    def blocks(self, boundary: int) -> range:
        """Indices of the blocks with what the token at `boundary`, a multiple of the block, sees of those before it."""
        first = max(0, boundary - self.window_tokens + 1)
        return range(first // self.block_tokens, boundary // self.block_tokens)


@dataclass(frozen=True)
class Windows:
    """Every window that a prefix hit computes again."""

    groups: tuple[WindowGroup, ...]
    interval_tokens: int
    """Snapshots lie at multiples of this: of every group's block, and of the window, so that the part of a hit past the
    last of them is shorter than what would be computed again without one."""

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig) -> "Windows | None":
        """The windows of a model; None where it has none that are computed again."""
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        groups = tuple(
            WindowGroup(number, spec.prefix_replay_tokens, spec.block_size, _layers(group))
            for number, (group, spec) in enumerate(zip(kv_cache_config.kv_cache_groups, specs, strict=True))
            if spec.prefix_replay_tokens
        )
        if not groups:
            return None
        return cls(groups, lcm(*(spec.block_size for spec in specs), *(group.window_tokens for group in groups)))

    @property
    def window_tokens(self) -> int:
        """The longest window."""
        return max(group.window_tokens for group in self.groups)

    def payload_bytes(self, boundary: int) -> int:
        """Of a snapshot at `boundary`."""
        return sum(len(group.blocks(boundary)) * size for group in self.groups for _, size in group.layers)

    def digest(self, namespace: bytes) -> bytes:
        """32 bytes that name these windows of the model, weights and formats that `namespace` names."""
        return hashlib.sha256(namespace + repr(self).encode()).digest()


def _layers(group: Any) -> tuple[tuple[str, int], ...]:
    each = group.kv_cache_spec
    specs = each.kv_cache_specs if isinstance(each, UniformTypeKVCacheSpecs) else {}
    return tuple((layer, specs.get(layer, each).unpadded_page_size_bytes) for layer in group.layer_names)


@dataclass
class Capture:
    """A snapshot to take."""

    request_id: str
    key: bytes
    blocks: Blocks


@dataclass
class Restore:
    """A snapshot to put into a request's new blocks."""

    request_id: str
    blocks: Blocks
    payload: bytes


@dataclass
class WindowPlan:
    """What the ranks do in one step."""

    captures: list[Capture] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)


class WindowCopies:
    """A rank's side. Rows of these windows are the same on every rank, so that one of them takes the snapshots."""

    def __init__(self, windows: Windows, kv_caches: dict[str, torch.Tensor], num_blocks: int) -> None:
        self._layers = [
            [group_kernel_blocks(kv_caches[layer], num_blocks) for layer, _ in group.layers] for group in windows.groups
        ]

    def capture(self, blocks: Blocks) -> bytes:
        """The bytes of a window, read after everything that the device was given before this call; none on failure."""
        try:
            pieces = [layer[list(ids)].contiguous().view(torch.uint8).flatten() for layer, ids in self._targets(blocks)]
            taken: bytes = torch.cat(pieces).cpu().numpy().tobytes()
        except (RuntimeError, IndexError, MemoryError):
            logger.exception("A snapshot could not be taken: its windows will be computed again")
            return b""
        return taken

    def restore(self, blocks: Blocks, payload: bytes) -> bool:
        """Write a snapshot into blocks; False where it is not one of these, or cannot be written."""
        if len(blocks) != len(self._layers):
            return False
        targets = self._targets(blocks)
        sizes = [layer[0].numel() * layer.element_size() * len(ids) for layer, ids in targets]
        if sum(sizes) != len(payload):
            return False
        try:
            pieces = torch.frombuffer(bytearray(payload), dtype=torch.uint8).split(sizes)
            for (layer, ids), piece in zip(targets, pieces, strict=True):
                layer[list(ids)] = piece.to(layer.device).view(layer.dtype).view(len(ids), *layer.shape[1:])
        except (RuntimeError, IndexError, MemoryError):
            logger.exception("A snapshot could not be loaded: its request is computed")
            return False
        return True

    def _targets(self, blocks: Blocks) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        return [(layer, ids) for layers, ids in zip(self._layers, blocks, strict=True) for layer in layers]
