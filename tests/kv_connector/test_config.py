"""The connector's configuration: one line for what is wrong, and what vLLM is told."""

from pathlib import Path
from typing import Any

import pytest

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_vllm.kv_connector import CONNECTOR
from deepinfer_vllm.kv_connector.config import ConnectorConfig

GOOD = {"root": "/mnt/3fs/kv", "capacity_bytes": 1 << 40}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"capacity": 5}, "'capacity' is unknown: one of backend, blocks_per_chunk, "),
        ({"root": None}, "'root' is None: input should be a valid string"),
        ({"io_threads": "some"}, "'io_threads' is 'some': "),
        ({"retention": {"high": 2}}, "retention"),
        ({"retention": {"classes": {}}}, "'retention.classes' is unknown: one of default_class, "),
        ({"eviction_policy": "fifo"}, "'eviction_policy' is 'fifo': input should be 'lru' or 'arc'"),
        ({"capacity_bytes": "many"}, "'capacity_bytes' is 'many': "),
        ({"cpu_bytes_to_use": -1}, "'cpu_bytes_to_use' is -1: "),
        ({"sync_load_budget_bytes": 1}, "'sync_load_budget_bytes' is unknown"),
    ],
)
def test_a_wrong_value_is_one_line(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StoreConfigError) as raised:
        ConnectorConfig.parse(GOOD | change)
    message = str(raised.value)
    assert message.startswith("kv_connector_extra_config: ") and complaint in message and "\n" not in message


def test_what_must_be_given() -> None:
    with pytest.raises(StoreConfigError, match="'root' is missing$"):
        ConnectorConfig.parse({"capacity_bytes": 1 << 40})
    with pytest.raises(StoreConfigError, match="capacity_bytes is 0, one slab takes 1073741824: raise"):
        ConnectorConfig.parse({"root": "/mnt/3fs/kv"})


def test_the_parts_of_the_stack_are_ours() -> None:
    for other in ({"spec_name": "CPUOffloadingSpec"}, {"secondary_tiers": [7]}, {"secondary_tiers": [{"type": "fs"}]}):
        with pytest.raises(StoreConfigError, match="leave spec_name and secondary_tiers out"):
            ConnectorConfig.parse(GOOD | other)


def test_options_of_the_store_stand_beside_the_others(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    extra = GOOD | {"slab_bytes": 1 << 20, "index_dir": "/var/index", "secret_file": str(secret), "fsync": True}
    extra["retention"] = {"ttl": {"chat": 3600}}
    options = ConnectorConfig.parse(extra).store_options()
    assert (options.slab_bytes, options.index_dir, options.fsync) == (1 << 20, Path("/var/index"), True)
    assert options.secret == b"s" * 32 and options.retention.ttl == {"chat": 3600}
    with pytest.raises(StoreConfigError, match="secret_file /nowhere: No such file or directory"):
        ConnectorConfig.parse(extra | {"secret_file": "/nowhere"}).store_options()


def test_completing_is_idempotent() -> None:
    extra: dict[str, Any] = dict(GOOD)
    config = ConnectorConfig.parse(extra)
    config.complete(extra)
    assert extra["spec_name"] == "StoreOffloadingSpec" and extra["offload_prompt_only"] is False
    once = dict(extra)
    again = ConnectorConfig.parse(extra)
    again.complete(extra)
    assert extra == once and again == config


def config_with(kv_transfer: dict[str, Any], **engine: Any) -> Any:
    """vLLM's whole configuration, as an engine makes it before it loads anything."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=engine.pop("model"), kv_transfer_config=kv_transfer, **engine).create_engine_config()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    from engine.llama import write_llama

    return str(write_llama(tmp_path_factory.mktemp("model") / "llama"))


def ours(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": GOOD | {"root": "."} | extra}


def test_hash_and_failure_policy_are_set(llama: str) -> None:
    config = config_with(ours(), model=llama)
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    inside = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    inside["kv_connector_extra_config"] = {"connectors": [ours()]}
    config = config_with(inside, model=llama)
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_an_engine_without_the_connector_is_left_alone(llama: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=llama).create_engine_config()
    assert config.cache_config.prefix_caching_hash_algo == "sha256"


def test_contrary_values_are_refused(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="--prefix-caching-hash-algo is 'xxhash', .* needs 'sha256_cbor': leave it out"
    ):
        config_with(ours(), model=llama, prefix_caching_hash_algo="xxhash")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "--prefix-caching-hash-algo", "sha256"])
    with pytest.raises(ValueError, match="--prefix-caching-hash-algo is 'sha256'"):
        config_with(ours(), model=llama, prefix_caching_hash_algo="sha256")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "--kv-transfer-config", '{"kv_load_failure_policy": "fail"}'])
    with pytest.raises(ValueError, match="kv_load_failure_policy is 'fail'"):
        config_with(ours() | {"kv_load_failure_policy": "fail"}, model=llama)
    config_with(ours() | {"kv_load_failure_policy": "recompute"}, model=llama)


def test_more_memory_than_there_is_is_refused(llama: str) -> None:
    """UCM#1282"""
    with pytest.raises(ValueError, match=r"cpu_bytes_to_use is 1\d+, /dev/shm holds \d+ bytes: less, or enlarge it"):
        config_with(ours(cpu_bytes_to_use=1 << 60), model=llama)


def test_a_root_that_is_not_there_is_refused_before_weights_are_loaded(llama: str) -> None:
    with pytest.raises(ValueError, match="root /nowhere is no directory: make it, or mount it"):
        config_with(ours(root="/nowhere"), model=llama)


def test_a_root_that_cannot_be_written_is_refused_before_weights_are_loaded(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # who runs tests may be root, who may write anywhere
    with pytest.raises(ValueError, match=r"root \. cannot be written: check owner and mount, or set read_only"):
        config_with(ours(), model=llama)
    config_with(ours(read_only=True), model=llama)


def test_a_secret_that_cannot_be_used_is_refused_before_weights_are_loaded(llama: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="secret_file /nowhere: No such file or directory"):
        config_with(ours(secret_file="/nowhere"), model=llama)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="secret has 5 bytes, it must have 32"):
        config_with(ours(secret_file=str(tmp_path / "secret")), model=llama)


def test_ranks_on_several_hosts_are_refused() -> None:
    """vllm#54415, vllm#44888: shared memory assumes one host, and ranks that inherit it."""
    from types import SimpleNamespace

    from deepinfer_vllm.kv_connector.settle import _check_parallel

    one = SimpleNamespace(nnodes_within_dp=1, distributed_executor_backend="mp", world_size=2)
    _check_parallel(one)
    with pytest.raises(StoreConfigError, match="these are on 2 hosts"):
        _check_parallel(SimpleNamespace(**vars(one) | {"nnodes_within_dp": 2}))
    with pytest.raises(StoreConfigError, match="Ray may place its 2 on several hosts"):
        _check_parallel(SimpleNamespace(**vars(one) | {"distributed_executor_backend": "ray"}))


def test_host_memory_is_shared_by_the_engines_of_a_host(llama: str) -> None:
    one, two = (config_with(ours(), model=llama, data_parallel_size=size) for size in (1, 2))
    extras = [config.kv_transfer_config.kv_connector_extra_config for config in (one, two)]
    assert extras[0]["cpu_bytes_to_use"] == 2 * extras[1]["cpu_bytes_to_use"]


def test_a_coded_store_is_configured_like_any_other_option() -> None:
    roots = [f"/disk{number}/kv" for number in range(12)]
    extra = {"root": roots[0], "capacity_bytes": 1 << 40, "ec": "10+2", "roots": roots}
    assert ConnectorConfig.parse(extra).options.roots == tuple(map(Path, roots))
    with pytest.raises(StoreConfigError, match="11 roots for ec 10.2: it needs 12"):
        ConnectorConfig.parse({**extra, "roots": roots[1:]})
