"""What the connector needs of the rest of an engine's configuration: set, or refused in one line."""

import os
import sys
from typing import Any

from vllm.logger import init_logger

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_vllm.kv_connector import CONNECTOR
from deepinfer_vllm.kv_connector.config import SHM, ConnectorConfig, default_cpu_bytes
from deepinfer_vllm.kv_connector.snapshot_service import Sharing

logger = init_logger("vllm." + __name__)

HASH = "sha256_cbor"


def settle(vllm_config: Any) -> None:
    """Check and complete a configuration that names the connector, and set the hash and the failure policy it needs.

    vLLM does not keep whether a value was given or is its default. A contrary one is refused where it cannot be the
    default, or stands on this process's command line; else it is replaced.

    Raises:
        StoreConfigError: something is wrong with it.
    """
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    for extra in _ours(transfer):
        # Once, here: every process of an engine must find the same.
        extra.setdefault("cpu_bytes_to_use", default_cpu_bytes(vllm_config.parallel_config.data_parallel_size_local))
        config = ConnectorConfig.parse(extra)
        Sharing.read(config)
        _check_shared_memory(config)
        if vllm_config.parallel_config.data_parallel_size_local:  # else no engine runs here
            _check_root(config)
            config.store_options().check()  # with the secret
        config.complete(extra)
    _check_parallel(vllm_config.parallel_config)
    if cache.prefix_caching_hash_algo not in ("sha256", HASH):
        _refuse("--prefix-caching-hash-algo", cache.prefix_caching_hash_algo, HASH)
    if cache.prefix_caching_hash_algo != HASH and _on_command_line("prefix-caching-hash-algo"):
        _refuse("--prefix-caching-hash-algo", cache.prefix_caching_hash_algo, HASH)
    if transfer.kv_load_failure_policy != "recompute" and _on_command_line("kv-load-failure-policy"):
        _refuse("kv_load_failure_policy", transfer.kv_load_failure_policy, "recompute")
    if (cache.prefix_caching_hash_algo, transfer.kv_load_failure_policy) != (HASH, "recompute"):
        cache.prefix_caching_hash_algo, transfer.kv_load_failure_policy = HASH, "recompute"
        logger.info_once(
            "%s: blocks are hashed with %s, and what cannot be loaded is computed (kv_load_failure_policy=recompute)",
            CONNECTOR,
            HASH,
        )


def _ours(transfer: Any) -> list[dict[str, Any]]:
    """The extra configurations that are ours: the engine's own, or those of a MultiConnector's children."""
    if transfer.kv_connector == CONNECTOR:
        return [transfer.kv_connector_extra_config]
    children = transfer.kv_connector_extra_config.get("connectors", [])
    ours = [child for child in children if child["kv_connector"] == CONNECTOR]
    return [child.setdefault("kv_connector_extra_config", {}) for child in ours]


def _check_shared_memory(config: ConnectorConfig) -> None:
    stat = os.statvfs(SHM)
    if config.cpu_bytes_to_use > (size := stat.f_blocks * stat.f_frsize):
        raise StoreConfigError(
            f"cpu_bytes_to_use is {config.cpu_bytes_to_use}, {SHM} holds {size} bytes: less, or enlarge it (--shm-size)"
        )


def _check_root(config: ConnectorConfig) -> None:
    """What would end the start only once the weights are loaded."""
    if config.options.backend != "posix" or config.options.roots:
        return
    if not os.path.isdir(config.root):
        raise StoreConfigError(f"root {config.root} is no directory: make it, or mount it")
    if not config.options.read_only and not os.access(config.root, os.W_OK | os.X_OK):
        raise StoreConfigError(f"root {config.root} cannot be written: check owner and mount, or set read_only")


def _check_parallel(parallel: Any) -> None:
    if parallel.nnodes_within_dp > 1:
        raise StoreConfigError(
            f"{CONNECTOR}: the ranks of an engine share memory, these are on {parallel.nnodes_within_dp} hosts: "
            "one host an engine, data parallelism between hosts"
        )
    if parallel.distributed_executor_backend == "ray" and parallel.world_size > 1:
        raise StoreConfigError(
            f"{CONNECTOR}: the ranks of an engine share memory, Ray may place its {parallel.world_size} on several "
            "hosts: --distributed-executor-backend mp"
        )


def _on_command_line(flag: str) -> bool:
    """Whether an argument of this process is this flag, or holds it as a part of a JSON or dotted one."""
    return any(flag in argument.replace("_", "-") for argument in sys.argv[1:])


def _refuse(name: str, value: Any, needed: str) -> None:
    raise StoreConfigError(f"{name} is {value!r}, {CONNECTOR} needs {needed!r}: leave it out")
