"""Engines over a store: their configuration, and hands on what they have stored."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.kv_connector import CONNECTOR

SLAB_BYTES = 8 << 20
SECONDS = 30.0


def transfer(root: Path, kv_role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The engine argument `kv_transfer_config` for a store at `root`, small."""
    small = {
        "root": str(root),
        "index_dir": str(root.with_name(f"{root.name}-index")),
        "capacity_bytes": 16 * SLAB_BYTES,
        "slab_bytes": SLAB_BYTES,
        "cpu_bytes_to_use": 16 << 20,
        "io_threads": 2,
        "sync_interval_s": 0.02,
    }
    return {"kv_connector": CONNECTOR, "kv_role": kv_role, "kv_connector_extra_config": small | extra}


@contextmanager
def engine_on(
    checkpoint: Path,
    root: Path,
    *,
    kv_role: str = "kv_both",
    extra: dict[str, Any] | None = None,
    dtype: str = "float32",
    **engine_args: Any,
) -> Iterator[EngineBackend]:
    """vLLM on a checkpoint, with what others have stored below `root`."""
    root.mkdir(exist_ok=True)
    arguments = {"kv_cache_memory_bytes": 32 << 20, "disable_log_stats": False, **engine_args}
    store = transfer(root, kv_role, **extra or {})
    backend = EngineBackend(checkpoint, dtype, "plain", kv_transfer_config=store, **arguments)
    try:
        yield backend
    finally:
        backend.close()


def tier_of(backend: EngineBackend) -> Any:
    """The store's tier inside the engine."""
    return backend.scheduler.connector.scheduler.manager.secondary_tiers[0]


def finish_stores(backend: EngineBackend) -> None:
    """Step the engine, as a server does when it has no requests, until nothing is on its way to the store."""
    engine = backend._llm.llm_engine
    deadline = time.monotonic() + SECONDS
    while engine.engine_core.engine_core.scheduler.has_requests():
        engine.step()  # which keeps what the step counted
        time.sleep(0.001)
        assert time.monotonic() < deadline, "transfers have not ended"


def forget(backend: EngineBackend) -> None:
    """Empty the engine's own caches, host rows included: what comes next comes from the store."""
    finish_stores(backend)
    assert backend._llm.llm_engine.reset_prefix_cache(reset_connector=True)
    finish_stores(backend)


def ask(backend: EngineBackend, prompt: list[int], count: int = 16, **sampling: Any) -> tuple[list[int], int]:
    """Greedy tokens after a prompt, and how many of the prompt's tokens were not computed."""
    output = backend._run([prompt], count, **sampling)[0]
    return list(output.outputs[0].token_ids), int(output.num_cached_tokens or 0)


def slabs(root: Path) -> list[Path]:
    """The slab files of all namespaces below `root`."""
    return sorted(root.glob("*/slabs/*.slab"))
