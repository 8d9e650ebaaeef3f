"""Kernels are registered through vLLM's hook where CANN's compiler is, and nowhere else."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.platforms.tilelang import registration, toolkit
from deepinfer_vllm.platforms.tilelang.registration import KERNELS, register

Overrides = Mapping[str, Callable[..., Any]]


def cann(home: Path) -> Path:
    """A compiler that runs, and nothing else of CANN."""
    compiler = home / "bin" / toolkit.COMPILER
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    return compiler


@pytest.fixture
def given() -> list[Overrides]:
    """What vLLM's registry was given."""
    return []


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was logged."""
    lines: list[str] = []
    monkeypatch.setattr(registration.logger, "info", lambda text, *values: lines.append(text % values))
    return lines


@pytest.fixture
def emitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TileLang that emits AscendC."""
    monkeypatch.setattr(toolkit, "emitter", lambda: None)


@pytest.mark.parametrize("place", [*toolkit.INSTALLED, *toolkit.HOMES, "PATH"])
def test_the_compiler_is_found_where_cann_and_tilelang_look(place: str, tmp_path: Path) -> None:
    home = tmp_path / (place if "/" in place else "elsewhere")
    compiler = cann(home)
    environ = {} if "/" in place else {place: str(home / "bin" if place == "PATH" else home)}
    assert toolkit.compiler(environ, tmp_path) == compiler
    compiler.chmod(0o644)
    assert toolkit.compiler(environ, tmp_path) is None


@pytest.mark.usefixtures("emitting")
def test_without_cann_nothing_is_registered_and_why_is_said(
    tmp_path: Path, given: list[Overrides], said: list[str]
) -> None:
    assert register(given.append, {}, tmp_path) == ()
    assert given == []
    (line,) = said
    assert "CANN's compiler `bisheng` is not on this machine" in line


@pytest.mark.usefixtures("emitting")
def test_with_cann_every_kernel_is_registered_under_the_name_of_what_it_replaces(
    tmp_path: Path, given: list[Overrides], said: list[str]
) -> None:
    cann(tmp_path / toolkit.INSTALLED[0])
    assert register(given.append, {}, tmp_path) == tuple(KERNELS)
    (overrides,) = given
    assert {name: f"{f.__module__}:{f.__name__}" for name, f in overrides.items()} == KERNELS
    assert "5 TileLang kernels" in said[-1]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_called_as_what_it_replaces(name: str) -> None:
    """But for the tile, which has a default."""
    module, _, attribute = name.rpartition(".")
    replaced = getattr(importlib.import_module(module), attribute)
    module, _, attribute = KERNELS[name].partition(":")
    kernel = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters.values()
    assert [p.name for p in kernel if p.kind is not p.KEYWORD_ONLY] == [*inspect.signature(replaced).parameters]
    assert all(p.default is not p.empty for p in kernel if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "TileLang is not installed"),
        (["tilelang/__init__.py"], "no Ascend backend"),
        (["tilelang/__init__.py", "tilelang/ascend/language/__init__.py"], None),
    ],
)
def test_a_tilelang_that_cannot_emit_is_told_without_importing_it(
    files: list[str], reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tilelang", raising=False)
    importlib.invalidate_caches()
    cann(tmp_path / toolkit.INSTALLED[0])
    found = registration.why_not({}, tmp_path)
    assert found is None if reason is None else reason in str(found)


THROUGH_VLLM = """
import pathlib, sys
from deepinfer_vllm.models.deepseek_v41 import attention, indexer, layer, mhc
from deepinfer_vllm.platforms.tilelang import delayed_mhc, registration, toolkit
import torch
from vllm.triton_utils.dispatcher import register_kernels
toolkit.emitter = lambda: None
names = registration.register(register_kernels, {}, pathlib.Path(sys.argv[1]))
assert names == tuple(registration.KERNELS), names
assert names == registration.register(register_kernels, {}, pathlib.Path(sys.argv[1]))
imported = [attention.located_attention, layer.expand, indexer.mask_scores, mhc.delayed, mhc.gates]
print(*(f"{f.func.__module__}:{f.func.__name__}" for f in imported))

def compiled(build, target, *arguments):
    def kernel(*tensors):
        for number, tensor in enumerate(tensors[-4:]):
            tensor.fill_(number)
    return kernel

delayed_mhc.compiled = compiled
part = mhc.HyperConnection(2, 8, 20, 1e-6, 1e-6)
x, pre, post, comb = part.delayed(torch.ones(3, 2, 8), torch.ones(3, 2))
shapes = [f"{tuple(t.shape)}={t.mean().item():g}" for t in (x, pre, post, comb)]
print(*shapes, *(tuple(t.shape) for t in part(x.new_ones(3, 2, 8))))
"""


def test_through_vllms_registry_the_models_modules_call_the_kernels(tmp_path: Path) -> None:
    """Also where a module has imported the operation by name. In a process of its own: the registry has no way back."""
    cann(tmp_path / toolkit.INSTALLED[0])
    done = subprocess.run(
        [sys.executable, "-c", THROUGH_VLLM, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[-2:]
    assert set(first.split()) == set(KERNELS.values())
    assert second == "(3, 8)=0 (3, 2)=1 (3, 2)=2 (3, 2, 2)=3 (3, 2) (3, 2) (3, 2, 2)"
