"""The smallest platform out of the tree: vLLM's for CPUs under another name."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vllm.platforms.cpu import CpuPlatform


class OtherCpuPlatform(CpuPlatform):
    """Nothing is changed."""


def platform() -> str:
    """The entry point of `vllm.platform_plugins`."""
    return "npu.cpu_platform.OtherCpuPlatform"


def main() -> None:
    """Ask a llama what the CPU was asked."""
    from vllm.platforms import current_platform

    from deepinfer_vllm.checkpoint.backends import EngineBackend

    asked = json.loads(os.environ["ASKED"])
    backend = EngineBackend(Path(os.environ["LLAMA"]), "float32", "plain", kv_cache_memory_bytes=32 << 20)
    answers = [answer.ids for answer in backend.generate_many(asked["prompts"], len(asked["answers"][0]), logits=False)]
    backend.close()
    same = "as the CPU" if answers == asked["answers"] else "otherwise"
    print(f"{type(current_platform).__module__}.{type(current_platform).__qualname__} answers {same}")


if __name__ == "__main__":
    main()
