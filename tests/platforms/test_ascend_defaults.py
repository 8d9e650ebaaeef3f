"""What is filled in of a V4.1 engine on Ascend: only what nobody has set."""

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_vllm.platforms.defaults import fill_unset
from deepinfer_vllm.platforms.engine_facts import Implementation

pytestmark = pytest.mark.vllm


def unset(**changes: Any) -> SimpleNamespace:
    """As vLLM's configuration is when the platform may fill in: test_ascend_checks.py has the real one."""
    from vllm.config import CacheConfig

    values: dict[str, Any] = {"block_size": None, "cudagraph_mode": None, "drafts_eager": None, **changes}
    cache = CacheConfig(block_size=values["block_size"])
    return SimpleNamespace(
        cache_config=cache,
        compilation_config=SimpleNamespace(cudagraph_mode=values["cudagraph_mode"]),
        speculative_config=SimpleNamespace(enforce_eager=values["drafts_eager"]),
    )


def seen(config: Any) -> tuple[int, str, bool]:
    return (
        config.cache_config.block_size,
        config.compilation_config.cudagraph_mode.name,
        config.speculative_config.enforce_eager,
    )


def test_fills_what_is_unset() -> None:
    for implementation, graphs in ((Implementation.PORTABLE, "NONE"), (Implementation.ASCEND, "FULL_DECODE_ONLY")):
        config = unset()
        fill_unset(config, implementation)
        assert seen(config) == (128, graphs, True)


def test_leaves_what_was_given() -> None:
    from vllm.config import CUDAGraphMode

    config = unset(block_size=16, cudagraph_mode=CUDAGraphMode.PIECEWISE, drafts_eager=False)
    fill_unset(config, Implementation.PORTABLE)
    assert seen(config) == (16, "PIECEWISE", False)


def test_without_drafts() -> None:
    config = unset()
    config.speculative_config = None
    fill_unset(config, Implementation.PORTABLE)
    assert config.speculative_config is None


def test_in_a_real_configuration(configured: dict[str, Any]) -> None:
    assert configured["plain"]["config"] == {"block_size": 128, "cudagraph_mode": "NONE"}
    assert configured["plain, all given"]["config"]["block_size"] == 64
