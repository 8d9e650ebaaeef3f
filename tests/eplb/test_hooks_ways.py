"""Presets of EPLB by vLLM's own making of a configuration: flags, configuration files and `LLM(...)`, whatever is given
in them, with each value of the variable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import parallel
from vllm.config.parallel import EPLBConfig
from vllm.engine.arg_utils import EngineArgs

from deepinfer_vllm.compat import eplb_presets
from engine.cpu_eplb import _AcceleratorLike
from engine.harness import GOLDEN

MODEL = str(GOLDEN / "v41-tiny-a")  # 8 experts
DEFAULTS = {"num_redundant_experts": 0, "window_size": 1_000, "step_interval": 3_000}
WANT = {
    "prefill": {"num_redundant_experts": 8, "window_size": 100, "step_interval": 1_000},
    "decode": {"num_redundant_experts": 2, "window_size": 1_000, "step_interval": 10_000},
    "off": DEFAULTS,
}
PLAIN = {"model": MODEL, "skip_tokenizer_init": True, "dtype": "float32", "tensor_parallel_size": 2}
BALANCED = {**PLAIN, "enable_expert_parallel": True, "enable_eplb": True}
Given = dict[str, Any]
Way = Callable[[Given, Path], EngineArgs]


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's part, and a platform that vLLM allows EPLB on."""
    eplb_presets.fill_eplb_presets()
    monkeypatch.setattr(parallel, "current_platform", _AcceleratorLike(parallel.current_platform))


def parsed(*flags: str) -> EngineArgs:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    switches = [f"--{name}" if value is True else f"--{name}={value}" for name, value in BALANCED.items()]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args([*switches, *flags]))


def one_flag(given: Given, folder: Path) -> EngineArgs:
    return parsed("--eplb-config", json.dumps(given)) if given else parsed()


def one_flag_with_underscores(given: Given, folder: Path) -> EngineArgs:
    return parsed(f"--eplb_config={json.dumps(given)}") if given else parsed()


def dotted_flags(given: Given, folder: Path) -> EngineArgs:
    return parsed(*(word for name, value in given.items() for word in (f"--eplb-config.{name}", json.dumps(value))))


def dotted_flags_with_equals(given: Given, folder: Path) -> EngineArgs:
    return parsed(*(f"--eplb_config.{name}={json.dumps(value)}" for name, value in given.items()))


def configuration_file(given: Given, folder: Path) -> EngineArgs:
    file = folder / "engine.yaml"
    file.write_text(json.dumps({"max-num-seqs": 8, **({"eplb-config": given} if given else {})}))  # YAML too
    return parsed("--config", str(file))


def dotted_configuration_file(given: Given, folder: Path) -> EngineArgs:
    file = folder / "engine.yaml"
    dotted = {f"eplb-config.{name}": json.dumps(value) for name, value in given.items()}  # vLLM drops a plain `false`
    file.write_text(json.dumps({"max-num-seqs": 8} | dotted))
    return parsed("--config", str(file))


class _Made(Exception):
    """Carries what `LLM` makes of its arguments, in place of the engine."""


def _llm(**more: Any) -> EngineArgs:
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    def made(engine_args: EngineArgs, **kwargs: Any) -> None:
        raise _Made(engine_args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Made) as found:
        patch.setattr(LLMEngine, "from_engine_args", made)
        LLM(**BALANCED, **more)
    made_args: EngineArgs = found.value.args[0]
    return made_args


def llm_with_a_dict(given: Given, folder: Path) -> EngineArgs:
    return _llm(eplb_config=dict(given)) if given else _llm()


def llm_with_an_object(given: Given, folder: Path) -> EngineArgs:
    return _llm(eplb_config=EPLBConfig(**given))


WAYS: tuple[Way, ...] = (
    *(one_flag, one_flag_with_underscores, dotted_flags, dotted_flags_with_equals),
    *(configuration_file, dotted_configuration_file, llm_with_a_dict, llm_with_an_object),
)


@pytest.mark.parametrize("name", WANT)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"window_size": 7},
        {"window_size": 1_000, "step_interval": 3_000},  # vLLM's own defaults, but given
        {"num_redundant_experts": 4, "window_size": 50, "step_interval": 60},
        {"use_async": False},
    ],
    ids=lambda given: ",".join(given) or "nothing",
)
def test_every_way_gets_what_it_left_unset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: Way, name: str, given: Given
) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_EPLB", name)
    found = way(given, tmp_path).create_engine_config().parallel_config.eplb_config
    assert {field: getattr(found, field) for field in DEFAULTS | given} == WANT[name] | given
