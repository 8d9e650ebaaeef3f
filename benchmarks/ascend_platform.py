"""How far vllm-ascend's real platform comes on the vLLM that is installed here, with a stand-in for torch-npu.

DIRECTORY holds the package vllm_ascend, installed with `pip install --target` or as a source tree that has the
_build_info.py of its build. vLLM resolves its platform, lets vllm-ascend change it, and configures engines: with the
versions that the metadata say and with such as would fit, by vllm-ascend's platform and by ours. Nothing asks an NPU.

Example: python benchmarks/ascend_platform.py build/ascend/site
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from facts import facts
from forked import in_a_fork

POINTS = "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Case:
    """`platform`: ours or stock. `versions`: as the metadata say, or such as would fit."""

    platform: str
    versions: str
    model: str


CASES = [
    Case("ours", "real", "llama"),
    Case("ours", "real", "v41"),
    Case("stock", "fitting", "llama"),
    Case("ours", "fitting", "llama"),
    Case("ours", "fitting", "v41"),
]


def write_metadata(site: Path, name: str, version_of: str, points: str = "") -> str:
    """A distribution that exists by its metadata alone; the site's path."""
    directory = site / f"{name.replace('-', '_')}-{version_of}.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version_of}\n")
    (directory / "entry_points.txt").write_text(points)
    return str(site)


def real_version(directory: Path) -> str:
    """What the metadata beside the package say, or "unknown" for a source tree."""
    found = next(iter(distributions(name="vllm-ascend", path=[str(directory)])), None)
    return found.version if found else "unknown"


def enter(case: dict[str, Any]) -> None:
    """Let this process be the case's: its path, its variables, its doubles."""
    import torch_npu_double

    os.environ["DEEPINFER_VLLM_ASCEND"] = "force" if case["platform"] == "ours" else "off"
    sys.path[:0] = case["paths"]
    importlib.invalidate_caches()
    torch_npu_double.install()


def configure(case: dict[str, Any]) -> dict[str, Any]:
    """In a fork: the platform's class, then the engine's settings or what was raised."""
    enter(case)
    import vllm.platforms
    from vllm.engine.arg_utils import EngineArgs

    vllm.platforms._current_platform = None
    platform = type(vllm.platforms.current_platform)
    answer: dict[str, Any] = {"class": f"{platform.__module__}.{platform.__qualname__}"}
    try:
        config = EngineArgs(model=case["path"], skip_tokenizer_init=True, dtype="bfloat16").create_engine_config()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raised_in = f"{Path(last.filename).parent.name}/{Path(last.filename).name}"
        return answer | {"error": f"{type(error).__name__}: {error}", "raised_in": raised_in}
    compilation = config.compilation_config
    return answer | {
        "worker": config.parallel_config.worker_cls,
        "device": config.device_config.device_type,
        "block_size": config.cache_config.block_size,
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "capture_sizes": compilation.cudagraph_capture_sizes,
        "custom_ops": compilation.custom_ops,
    }


INSPECT = """
from vllm.model_executor.models import ModelRegistry
from vllm.plugins import load_general_plugins
load_general_plugins()
ModelRegistry.models["DeepseekV41ForCausalLM"].inspect_model_cls()
"""
"""Kept by vLLM: the process in which it looks at a model's class has no stand-ins."""


def run(directory: Path, made: Path) -> list[dict[str, Any]]:
    """Every case with its answer."""
    import vllm.platforms  # noqa: F401  (once, for all forks)

    from deepinfer_vllm.checkpoint.create import create

    subprocess.run([sys.executable, "-c", INSPECT], check=True)
    create(made / "v41")
    (made / "llama").mkdir()
    (made / "llama/config.json").write_text(json.dumps(LLAMA))
    npu = write_metadata(made / "npu", "torch-npu", version("torch").partition("+")[0])
    fitting = write_metadata(made / "fitting", "vllm-ascend", version("vllm").partition("+")[0], POINTS)
    known = real_version(directory) != "unknown"
    real = [str(directory)] if known else [write_metadata(made / "real", "vllm-ascend", "0", POINTS), str(directory)]
    paths = {"real": [npu, *real], "fitting": [fitting, npu, str(directory)]}
    rows = []
    for case in CASES:
        request = {**asdict(case), "paths": paths[case.versions], "path": str(made / case.model)}
        rows.append({**asdict(case), **in_a_fork(configure, request)})
        outcome = rows[-1].get("error") or rows[-1].get("died") or rows[-1]["worker"]
        print(f"{', '.join(map(str, asdict(case).values()))}: {outcome}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the package vllm_ascend lies")
    parser.add_argument("--out", type=Path, help="file for the answers, as JSON; default: printed")
    parser.add_argument("--source", default="", help="what the package is, for the record: a release or a commit")
    arguments = parser.parse_args()
    if not (arguments.directory / "vllm_ascend" / "platform.py").is_file():
        parser.error(f"{arguments.directory}: has no vllm_ascend/platform.py; `make ascend` installs one")
    printed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    with tempfile.TemporaryDirectory() as made:
        rows = run(arguments.directory.resolve(), Path(made))
    source = arguments.source or real_version(arguments.directory)
    command = f"python benchmarks/ascend_platform.py DIRECTORY --source {source}"
    record = json.dumps({**facts(command), "vllm_ascend": source, "cases": rows}, indent=1)
    if arguments.out:
        arguments.out.write_text(f"{record}\n")
    else:
        print(record, file=printed, flush=True)


if __name__ == "__main__":
    main()
