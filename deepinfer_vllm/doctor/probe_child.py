"""Runs alone in a subprocess, by path: prints one JSON line for each stage. Imports nothing of this package at its top.

`probe_child.py import NAME...` imports each module; `probe_child.py vllm` asks vLLM what it resolves here.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial

# vLLM logs to stdout. Keep the real one for the answers and let everything else go to stderr.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def stage(name: str, action: Callable[[], str]) -> bool:
    """Answer with what `action` says; whether it raised nothing."""
    try:
        answer = {"stage": name, "ok": True, "text": action()}
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        answer = {"stage": name, "ok": False, "text": f"{type(error).__name__}: {lines[0]}"[:300]}
    print(json.dumps(answer), file=answers)
    return bool(answer["ok"])


def version(module: str) -> str:
    return str(getattr(importlib.import_module(module), "__version__", "unknown version"))


def import_llm() -> str:
    from vllm import LLM

    return f"{LLM.__module__}.{LLM.__qualname__}"


def platform() -> str:
    from vllm.platforms import current_platform

    kind = "out-of-tree" if current_platform.is_out_of_tree() else current_platform.device_type or "unspecified"
    return f"{kind} {type(current_platform).__module__}.{type(current_platform).__qualname__}"


def runner() -> str:
    from vllm.config import VllmConfig

    return "V2" if VllmConfig().use_v2_model_runner else "V1"


def plugins() -> str:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_general_plugins, load_plugins_by_group

    load_general_plugins()
    return " ".join(sorted(load_plugins_by_group(DEFAULT_PLUGINS_GROUP)))


def model() -> str:
    from vllm.model_executor.models import ModelRegistry

    registered = ModelRegistry.models["DeepseekV41ForCausalLM"]
    registered.inspect_model_cls()  # imports it in a subprocess, as a first start would, and keeps what it finds
    return f"{registered.module_name}:{registered.class_name}"


def not_tried() -> str:
    raise NotTried("vllm cannot be imported")  # a second try would fail at what the first has left behind


class NotTried(Exception):
    """What a stage needs has failed."""


STAGES = {
    "from vllm import LLM": import_llm,
    "platform": platform,
    "runner": runner,
    "plugins": plugins,
    "model": model,
}
"""In this order, after vllm has been imported."""


def main(mode: str, *modules: str) -> None:
    if mode == "import":
        for name in modules:
            stage(name, partial(version, name))
        return
    imported = stage("import vllm", partial(version, "vllm"))
    for name, action in STAGES.items():
        stage(name, action if imported else not_tried)


if __name__ == "__main__":
    main(*sys.argv[1:])
