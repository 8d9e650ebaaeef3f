"""vLLM's `LLM` for commands that answer a file and end: started, its refusals as one line, and gone afterwards."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Unless set: what is slow is shown by progress bars, and a small model's threads and processes wait for each other."""
CPU_ARGUMENTS: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 16}


class EngineError(ValueError):
    """vLLM refuses what it was given, or cannot do it. One line."""


@contextmanager
def refusals() -> Iterator[None]:
    """The errors by which vLLM refuses a setting, a checkpoint or a prompt, as EngineErrors of one line."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (ValueError, VLLMClientError) as error:
        checked = getattr(error, "errors", None)  # pydantic's
        raise EngineError(_first(checked()) if callable(checked) else " ".join(str(error).split())) from error


def _first(details: list[Any]) -> str:
    """Of pydantic's errors: the field and its value, where it is one's, and what is wrong."""
    field = str(next(iter(details[0]["loc"]), ""))
    return (f"{field} = {details[0]['input']!r}: " if field else "") + str(details[0]["msg"])


@contextmanager
def offline_engine(model: str, environment: Mapping[str, str], **arguments: Any) -> Iterator[Any]:
    """An `LLM`, stopped at the end; on a CPU with `CPU_ARGUMENTS` where `arguments` say nothing else.

    `environment` is set for it and for its workers while it lives. Raises EngineError for what vLLM refuses. One at a
    time, on one thread.
    """
    values = {**{name: os.environ.get(name, value) for name, value in DEFAULTS.items()}, **environment}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield from _started(model, arguments)
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _started(model: str, arguments: dict[str, Any]) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.envs import disable_envs_cache
    from vllm.platforms import current_platform

    disable_envs_cache()
    if current_platform.is_cpu():
        arguments = {**CPU_ARGUMENTS, **arguments}
    try:
        with refusals():
            llm = LLM(model, **arguments)
    except OSError as error:  # no such directory, and nothing of that name where vLLM looks then
        raise EngineError(f"{model}: {' '.join(str(error).split())}") from error
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
