"""Presets of EPLB fill what the user left unset, however it was given, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_vllm.compat import eplb_presets
from deepinfer_vllm.eplb.presets import PRESETS


@pytest.fixture(autouse=True)
def hooked() -> None:
    eplb_presets.fill_eplb_presets()
    eplb_presets.fill_eplb_presets()  # vLLM may register plugins more than once


def parsed(*flags: str) -> Any:
    """The EPLB configuration of a command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(flags)).eplb_config


def filled(
    eplb: Any, monkeypatch: pytest.MonkeyPatch, name: str = "prefill", *, experts: int = 384, enabled: bool = True
) -> tuple[int, int, int]:
    """Redundant experts, window and interval after filling, on 2 data-parallel times 2 tensor-parallel ranks."""
    monkeypatch.setenv("DEEPINFER_VLLM_EPLB", name)
    parallel = SimpleNamespace(eplb_config=eplb, enable_eplb=enabled, world_size_across_dp=4, pipeline_parallel_size=1)
    eplb_presets.fill(
        SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(get_num_experts=lambda: experts))
    )
    return eplb.num_redundant_experts, eplb.window_size, eplb.step_interval


@pytest.mark.parametrize(
    ("name", "experts", "ranks", "want"),
    [
        ("prefill", 384, 4, (16, 100, 1_000)),
        ("prefill", 384, 2, (8, 100, 1_000)),
        ("decode", 384, 64, (64, 1_000, 10_000)),
        ("decode", 384, 72, (120, 1_000, 10_000)),  # 456 slots are rounded to 7 on each rank
        ("decode", 8, 3, (4, 1_000, 10_000)),
    ],
)
def test_settings(name: str, experts: int, ranks: int, want: tuple[int, int, int]) -> None:
    settings = PRESETS[name].settings(experts, ranks)
    assert tuple(settings.values()) == want
    assert (experts + settings["num_redundant_experts"]) % ranks == 0


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ((), (16, 100, 1_000)),
        (("--eplb-config", '{"window_size": 7}'), (16, 7, 1_000)),
        (("--eplb-config", '{"num_redundant_experts": 0}'), (0, 100, 1_000)),  # vLLM's defaults, but given
        (("--eplb-config.window_size", "1000", "--eplb-config.step_interval", "3000"), (16, 1000, 3000)),
        (("--eplb-config.use_async", "false"), (16, 100, 1_000)),
    ],
)
def test_command_line(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], want: tuple[int, int, int]) -> None:
    from vllm.config.parallel import EPLBConfig

    eplb = parsed(*flags)
    assert filled(eplb if flags else EPLBConfig(), monkeypatch) == want


def test_a_configuration_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.parallel import EPLBConfig

    assert filled(EPLBConfig(num_redundant_experts=0), monkeypatch) == (0, 100, 1_000)
    assert filled(EPLBConfig(step_interval=3000), monkeypatch, "decode") == (4, 1_000, 3_000)


def test_a_configuration_older_than_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody noted what was given: what differs from the default was."""
    from vllm.config.parallel import EPLBConfig

    eplb = EPLBConfig(window_size=50)
    eplb_presets._given.clear()
    assert filled(eplb, monkeypatch) == (16, 50, 1_000)


def test_once(monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]]) -> None:
    """A configuration that was filled stays as it is, and what was filled is said."""
    from vllm.config.parallel import EPLBConfig

    eplb = EPLBConfig(window_size=50)
    assert filled(eplb, monkeypatch) == filled(eplb, monkeypatch, "decode") == (16, 50, 1_000)
    assert [message for _, message in said] == [
        "DEEPINFER_VLLM_EPLB=prefill sets of EPLB: num_redundant_experts=16, step_interval=1000.",
        "DEEPINFER_VLLM_EPLB=decode sets of EPLB: nothing, all was given.",
    ]


@pytest.mark.parametrize(
    ("experts", "enabled", "why"), [(384, False, "--enable-eplb is not given"), (0, True, "no experts")]
)
def test_without_effect(
    monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]], experts: int, enabled: bool, why: str
) -> None:
    from vllm.config.parallel import EPLBConfig

    assert filled(EPLBConfig(), monkeypatch, experts=experts, enabled=enabled) == (0, 1_000, 3_000)
    assert why in said[-1][1]


def test_off_and_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.parallel import EPLBConfig

    assert filled(EPLBConfig(), monkeypatch, "off") == (0, 1_000, 3_000)
    with pytest.raises(ValueError, match=r"^DEEPINFER_VLLM_EPLB='both': the value must be off or prefill or decode"):
        filled(EPLBConfig(), monkeypatch, "both")


def test_nothing_is_left_in_or_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hashes and copies configurations by all that is in them."""
    import dataclasses

    from vllm.config.parallel import EPLBConfig

    eplb = EPLBConfig(window_size=50)
    filled(eplb, monkeypatch)
    assert vars(eplb).keys() == {field.name for field in dataclasses.fields(EPLBConfig)}
    noted = len(eplb_presets._given)
    del eplb
    assert len(eplb_presets._given) == noted - 1
