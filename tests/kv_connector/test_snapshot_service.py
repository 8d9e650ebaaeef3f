"""Options of sharing snapshots: what works, and one line on what does not."""

from pathlib import Path
from typing import Any

import pytest

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_vllm.kv_connector.config import ConnectorConfig
from deepinfer_vllm.kv_connector.snapshot_service import SnapshotService


def config(tmp_path: Path, **options: Any) -> ConnectorConfig:
    (tmp_path / "token").write_text("a token\n")
    good = {
        "root": str(tmp_path),
        "capacity_bytes": 1 << 30,
        "swa_bytes": 1 << 20,
        "swa_directory": "127.0.0.1:1",
        "swa_listen": "127.0.0.1:0",
        "swa_token_file": str(tmp_path / "token"),
        "swa_insecure": True,
    }
    return ConnectorConfig.parse({name: value for name, value in (good | options).items() if value is not None})


def test_it_serves_under_the_address_that_it_announces(tmp_path: Path) -> None:
    service = SnapshotService(config(tmp_path))
    assert service.exchange is not None and service._server is not None
    assert service.exchange._address == f"127.0.0.1:{service._server.port}"
    service.close()
    service.close()


def test_alone_it_serves_nobody(tmp_path: Path) -> None:
    service = SnapshotService(config(tmp_path, swa_directory=None))
    assert service.exchange is None and service._server is None
    assert service.ring.stats().capacity_bytes == 1 << 20
    service.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"swa_listen": None}, "swa_directory needs swa_listen and swa_token_file"),
        ({"swa_token_file": None}, "swa_directory needs swa_listen and swa_token_file"),
        ({"swa_token_file": "/nowhere/token"}, "swa_token_file /nowhere/token"),
        ({"swa_listen": "9500"}, "swa_listen '9500' must be HOST:PORT"),
        ({"swa_directory": "host:http"}, "swa_directory 'host:http' must be HOST:PORT"),
        ({"swa_insecure": False}, "swa_tls_cert, swa_tls_key and swa_tls_ca, or swa_insecure"),
        ({"swa_tls_ca": "ca.pem"}, "swa_tls_cert, swa_tls_key and swa_tls_ca, or swa_insecure"),
        (
            {"swa_insecure": False, "swa_tls_cert": "/n/c", "swa_tls_key": "/n/k", "swa_tls_ca": "/n/a"},
            "swa_tls_cert /n/c, swa_tls_key /n/k, swa_tls_ca /n/a: .*No such file",
        ),
    ],
)
def test_what_does_not_work_is_said_in_one_line(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(StoreConfigError, match=said) as error:
        SnapshotService(config(tmp_path, **options))
    assert "\n" not in str(error.value)
