"""Compare implementations of the model with a directory of golden values, and print the deviations."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deepinfer_vllm.checkpoint import golden
from deepinfer_vllm.checkpoint.checks import check_prompt
from deepinfer_vllm.checkpoint.compare import Row
from deepinfer_vllm.checkpoint.golden import Golden, Values
from deepinfer_vllm.checkpoint.interface import Backend, Generation, Prefill
from deepinfer_vllm.checkpoint.limits import FORMAT_LIMITS, Limits
from deepinfer_vllm.checkpoint.report import make_console, print_rows
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError

__all__ = ["Backend", "Factory", "Generation", "Prefill", "run"]

Factory = Callable[[Path, str, str], Backend]  # directory, dtype, numerics

BACKENDS = {"bare": ("bare",), "engine": ("engine",), "both": ("bare", "engine")}
NUMERICS = {"plain": ("plain",), "qat": ("qat",), "all": ("plain", "qat")}
DTYPES = ("float32", "bfloat16")


def run(
    directory: str | Path,
    *,
    backend: str = "both",
    numerics: str = "all",
    dtype: str = "float32",
    all_rows: bool = False,
    factories: Mapping[str, Factory] | None = None,
    **engine_args: Any,
) -> int:
    """Run every golden prompt through each backend; 0 when all is within its limits, else 1.

    `backend` is bare, engine or both; `numerics` plain, qat or all that the directory has values for; `dtype` float32
    or bfloat16. `factories` replaces the backends (by the names bare and engine); `engine_args` go to vLLM's `LLM`.
    Raises CheckpointError for a directory that is not in the golden format and for an unknown choice.
    """
    names = _choose("backend", backend, BACKENDS)
    kinds = _choose("numerics", numerics, NUMERICS)
    _choose("dtype", dtype, {name: (name,) for name in DTYPES})
    vectors = golden.read(directory)
    missing = [kind for kind in kinds if kind not in vectors.values]
    if numerics == "all" and missing != list(kinds):
        kinds = tuple(kind for kind in kinds if kind in vectors.values)
    elif missing:
        raise CheckpointError(
            f"{directory} has no {' and no '.join(missing)} values: it has {', '.join(vectors.values)}"
        )
    factories = factories or _default_factories(engine_args)
    console = make_console()
    within = True
    for kind in kinds:
        values, limits = vectors.values[kind], _limits(vectors, kind, dtype)
        for name in names:
            rows = _compare(factories[name], vectors.directory, values, limits, dtype)
            print_rows(console, f"{name}, {dtype}, {kind}", rows, all_rows)
            within = within and bool(rows) and all(row.ok for row in rows)
        if limits.unknown:
            console.print(f"golden.json has limits that nothing here checks: {', '.join(limits.unknown)}")
    return 0 if within else 1


def _compare(factory: Factory, directory: Path, values: Values, limits: Limits, dtype: str) -> list[Row]:
    try:
        backend = factory(directory, dtype, values.kind)
    except (OSError, ValueError) as error:  # vLLM checks config and files while it builds
        raise CheckpointError(f"{directory} does not load: {' '.join(str(error).split())}") from error
    try:
        return [row for prompt in values.prompts for row in check_prompt(backend, prompt, limits)]
    finally:
        backend.close()


def _limits(vectors: Golden, kind: str, dtype: str) -> Limits:
    """bfloat16 is compared with the float32 values, within the limits of the bf16 file."""
    if dtype == "float32":
        return vectors.values[kind].limits
    return vectors.values["bf16"].limits if "bf16" in vectors.values else FORMAT_LIMITS["bf16"]


def _choose(what: str, value: str, choices: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    if value not in choices:
        raise CheckpointError(f"unknown {what} {value!r}: choose from {', '.join(choices)}")
    return choices[value]


def _default_factories(engine_args: dict[str, Any]) -> dict[str, Factory]:
    """Looked up by name, since they import vLLM."""
    backends = importlib.import_module("deepinfer_vllm.checkpoint.backends")
    return {"bare": backends.BareBackend, "engine": partial(backends.EngineBackend, **engine_args)}
