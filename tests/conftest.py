"""Fixtures that more than one test file uses."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fake_site import FakeSite

# Before anything imports torch or vLLM. Two threads on two busy cores wait for each other most of the time, and vLLM
# would compile a kernel for 20 s at the first request for logprobs.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}.items():
    os.environ.setdefault(name, value)

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def root() -> Path:
    """The root of the project."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    """An empty fake site-packages."""
    path = tmp_path / "site-packages"
    path.mkdir()
    return FakeSite(path)
