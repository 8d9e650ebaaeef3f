"""What a user writes as `kv_connector_extra_config`, checked, and what vLLM's offload stack is told of it."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.retention import Retention

GIB = 1 << 30
SHM = "/dev/shm"
SPEC, TIER = "StoreOffloadingSpec", "StoreTier"


class ConnectorConfig(BaseModel):
    """What may stand in `kv_connector_extra_config` beside the options of the store. Sizes in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: str
    """Shared directory of the store: engines that are given the same one find each other's blocks."""
    secret_file: Path | None = None
    """File with the secret that proves who has written a block, where the root is open to others."""
    cpu_bytes_to_use: int = Field(default_factory=lambda: default_cpu_bytes(), gt=0)
    """Host memory of each engine, through which blocks pass, and where the recent ones stay. By default a quarter of
    /dev/shm, shared by the data-parallel engines of the host, at most 16 GiB each; several long prompts should fit."""
    offload_prompt_only: bool = False
    """True: only prompts are stored. By default answers are too: they are part of the conversation's next prompt."""
    eviction_policy: Literal["lru", "arc"] = "lru"
    """Which host rows are given away first, by vLLM's name."""
    blocks_per_chunk: int = Field(default=1, ge=1)
    """Blocks of the engine in one stored block. More makes larger transfers and coarser hits."""
    self_describing_kv_events: bool = True
    """Events say which tokens a block holds: without, a router cannot use them."""
    swa_bytes: int = Field(default=0, ge=0)
    """Host memory for snapshots of sliding windows where turns end; 0: none, and windows are computed again."""
    swa_per_sequence: int = Field(default=2, ge=1)
    """The newest snapshots of a conversation that are kept."""
    swa_expiry_s: float = Field(default=600, gt=0)
    """How long a snapshot is kept after its last use."""
    swa_directory: str | None = None
    """`host:port` of a daemon with role swa, by which nodes find each other's snapshots; None: each has its own."""
    swa_listen: str | None = None
    """`host:port` at which this engine serves its snapshots, and by which others reach it."""
    swa_token_file: Path | None = None
    swa_tls_cert: Path | None = None
    swa_tls_key: Path | None = None
    swa_tls_ca: Path | None = None
    """Certificate that other nodes' are signed with."""
    swa_insecure: bool = False
    """Instead of the three: the network between nodes is trusted."""
    swa_wait_s: float = Field(default=0.1, ge=0)
    """The longest that a request waits for another node's snapshot."""
    pd_wait_s: float = Field(default=2.0, ge=0)
    """The longest that a prefill engine's answer waits for its blocks to be stored, and a decode engine's request for
    them to arrive; see `handover`."""
    weights: str | None = Field(default=None, min_length=1)
    """Name of the weights' revision where the checkpoint's own cannot be trusted: two engines with the same name and
    the same config.json share blocks."""
    options: StoreOptions
    """The store's own options stand beside the others: `capacity_bytes` and those of `StoreOptions`."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "ConnectorConfig":
        """Read a user's dictionary, also one that `complete` has added to.

        Raises:
            StoreConfigError: something in it is unknown, missing or out of range: one line with each of them.
        """
        match extra.get("spec_name", SPEC), extra.get("secondary_tiers", ADDED["secondary_tiers"]):
            case str(spec), [{"type": str(tier)}] if (spec, tier) == (SPEC, TIER):
                pass
            case _:
                raise StoreConfigError("kv_connector_extra_config: leave spec_name and secondary_tiers out")
        own = {name: value for name, value in extra.items() if name not in ADDED and name not in STORE}
        store = {name: value for name, value in extra.items() if name in STORE}
        if isinstance(marks := store.get("retention"), Mapping) and (unknown := sorted(marks.keys() - RETENTION)):
            raise StoreConfigError(
                f"kv_connector_extra_config: 'retention.{unknown[0]}' is unknown: one of {', '.join(sorted(RETENTION))}"
            )
        try:
            config = cls(**own, options=_OPTIONS.validate_python(store))
        except ValidationError as error:
            raise StoreConfigError(f"kv_connector_extra_config: {'; '.join(_say(e) for e in error.errors())}") from None
        config.options.check()
        return config

    def store_options(self) -> StoreOptions:
        """How the store is to be opened.

        Raises:
            StoreConfigError: the secret cannot be read.
        """
        if self.secret_file is None:
            return self.options
        try:
            return replace(self.options, secret=self.secret_file.read_bytes())
        except OSError as error:
            raise StoreConfigError(f"secret_file {self.secret_file}: {error.strerror}") from error

    def complete(self, extra: dict[str, Any]) -> None:
        """Add to the user's dictionary what vLLM's offload stack wants to find in it. Idempotent."""
        extra.update(self.model_dump(include=OFFLOADING))
        for name, value in ADDED.items():
            extra.setdefault(name, value)


STORE = {field.name for field in fields(StoreOptions)} - {"secret"}
RETENTION = {field.name for field in fields(Retention)}
_OPTIONS = TypeAdapter(StoreOptions)
OFFLOADING = {
    "cpu_bytes_to_use", "offload_prompt_only", "eviction_policy", "blocks_per_chunk", "self_describing_kv_events",
}  # fmt: skip
"""What vLLM's stack reads itself; it has other defaults."""
ADDED: dict[str, Any] = {"spec_name": SPEC, "secondary_tiers": [{"type": TIER}]}


def default_cpu_bytes(engines: int = 1) -> int:
    """A quarter of /dev/shm for all engines of the host, at most 16 GiB each."""
    stat = os.statvfs(SHM)
    return min(16 * GIB, stat.f_blocks * stat.f_frsize // 4 // max(1, engines))


def _say(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{name!r} is unknown: one of {', '.join(sorted({*ConnectorConfig.model_fields, *STORE} - {'options'}))}"
    if error["type"] == "missing":
        return f"{name!r} is missing"
    return f"{name!r} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
