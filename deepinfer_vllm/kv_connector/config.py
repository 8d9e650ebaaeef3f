"""What a user writes as `kv_connector_extra_config`, checked, and what vLLM's offload stack is told of it."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_kvstore.errors import StoreConfigError

GIB = 1 << 30
SHM = "/dev/shm"


class ConnectorConfig(BaseModel):
    """Everything that may stand in `kv_connector_extra_config`. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: str
    """Shared directory of the store: engines that are given the same one find each other's blocks."""
    capacity_bytes: int = Field(gt=0)
    """What the store may take below `root`, all engines together."""

    cpu_bytes_to_use: int = Field(default_factory=lambda: default_cpu_bytes(), gt=0)
    """Host memory that blocks pass through, and the recent ones stay in; a quarter of /dev/shm, at most 16 GiB."""
    offload_prompt_only: bool = False
    """True: only prompts are stored. By default answers are too: they are part of the conversation's next prompt."""
    eviction_policy: str = "lru"
    blocks_per_chunk: int = Field(default=1, ge=1)
    """Blocks of the engine in one stored block. More makes larger transfers and coarser hits."""
    self_describing_kv_events: bool = True
    """Events say which tokens a block holds: without, a router cannot use them."""
    weights: str | None = Field(default=None, min_length=1)
    """Name of the weights' revision where the checkpoint's own cannot be trusted: two engines with the same name and
    the same config.json share blocks."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "ConnectorConfig":
        """Read a user's dictionary, also one that `complete` has added to.

        Raises:
            StoreConfigError: something in it is unknown, missing or out of range: one line with each of them.
        """
        try:
            return cls(**{name: value for name, value in extra.items() if name not in ADDED})
        except ValidationError as error:
            raise StoreConfigError(f"kv_connector_extra_config: {'; '.join(_say(e) for e in error.errors())}") from None

    def complete(self, extra: dict[str, Any]) -> None:
        """Add to the user's dictionary what vLLM's offload stack wants to find in it. Idempotent."""
        extra.update(self.model_dump(include=OFFLOADING), **ADDED)


OFFLOADING = {
    "cpu_bytes_to_use", "offload_prompt_only", "eviction_policy", "blocks_per_chunk", "self_describing_kv_events",
}  # fmt: skip
"""What vLLM's stack reads itself; it has other defaults."""
ADDED: dict[str, Any] = {
    "spec_name": "StoreOffloadingSpec",
    "spec_module_path": "deepinfer_vllm.kv_connector.spec",
    "secondary_tiers": [],
}


def default_cpu_bytes() -> int:
    """A quarter of /dev/shm, at most 16 GiB. Of its size, not of what is free: every process must find the same."""
    stat = os.statvfs(SHM)
    return min(16 * GIB, stat.f_blocks * stat.f_frsize // 4)


def _say(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{name!r} is unknown: one of {', '.join(sorted(ConnectorConfig.model_fields))}"
    if error["type"] == "missing":
        return f"{name!r} is missing"
    return f"{name!r} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
