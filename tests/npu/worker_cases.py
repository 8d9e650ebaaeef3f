"""The worker that copies KV blocks, on the emulated device; run by `test_emulated_npu` in a process of its own."""

from __future__ import annotations

import pytest

from kv_connector.test_device_worker import assert_copies_as_the_cpu_worker
from npu import device

device.install()


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_every_byte_as_on_the_host(per_chunk: int) -> None:
    assert_copies_as_the_cpu_worker("npu", per_chunk)
