"""The scheduler's settings."""

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """settings(TARGET_MS=20, ...) of the scheduler, for this test; at first a target of 30 ms."""

    def change(**values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"DEEPINFER_VLLM_SCHED_{name}", str(value))

    change(TARGET_MS=30)
    return change
