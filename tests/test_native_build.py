"""Building the C kernels: once, atomically, and never a reason not to start."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from deepinfer_vllm.native import build as module
from small_model import normal


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DEEPINFER_VLLM_NATIVE", raising=False)
    monkeypatch.setattr(module, "kernels", module.functools.cache(module.kernels.__wrapped__))


def test_built_once_and_alone_in_its_directory(tmp_path: Path) -> None:
    library = module.kernels()
    assert library is not None and hasattr(library, "sinkhorn")
    (built,) = (tmp_path / "deepinfer_vllm").iterdir()
    assert module.build(tmp_path / "deepinfer_vllm", "/no/such/compiler") == built


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_NATIVE", "0")
    assert module.kernels() is None and not any(tmp_path.iterdir())


@pytest.mark.parametrize("obstacle", ["no compiler", "a failing compiler", "no home", "no room", "not a library"])
def test_what_stands_in_the_way_is_said_once(obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if obstacle == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    elif obstacle == "a failing compiler":
        monkeypatch.setenv("CC", "false")
    elif obstacle == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(module.native.Path, "home", lambda: Path("~a-user-of-no-name").expanduser())  # raises
    elif obstacle == "no room":
        (tmp_path / "deepinfer_vllm").write_text("")
    else:
        monkeypatch.setattr(module, "build", lambda *_: Path(__file__))
    said: list[str] = []  # pytest's own capture depends on whether vLLM has set up its loggers yet
    monkeypatch.setattr(module.logger, "info", lambda text, *args: said.append(text % args))
    assert module.kernels() is None and module.kernels() is None
    assert len(said) == 1 and "PyTorch does their work" in said[0]
    assert module.logger.name.startswith("vllm.")  # others are not shown


def test_a_compiler_that_refuses_is_quoted(tmp_path: Path) -> None:
    strict = tmp_path / "strict-cc"
    strict.write_text(
        "#!/bin/sh\necho in a function: >&2; echo kernels.c:1: error: no such thing >&2; echo '   ^~~' >&2; exit 1\n"
    )
    strict.chmod(0o755)
    with pytest.raises(OSError, match=r"strict-cc failed: kernels\.c:1: error: no such thing$"):
        module.build(tmp_path, str(strict))
    with pytest.raises(OSError, match=r"false failed: exit status 1$"):
        module.build(tmp_path, "false")


def test_a_compiler_that_knows_no_levels_of_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GCC 11 of long-lived distributions. It is asked for single instructions instead."""
    old = tmp_path / "old-cc"
    old.write_text(f'#!/bin/sh\nexec {module.native.compiler()} -U__GNUC__ -D__GNUC__=11 "$@"\n')
    old.chmod(0o755)
    library = ctypes.CDLL(str(module.build(tmp_path, str(old))))
    x, weight, out = normal(1, 2, 70), normal(2, 5, 70), torch.empty(2, 5)
    library.few_rows(*(ctypes.c_void_p(t.data_ptr()) for t in (x, weight, out)), *map(ctypes.c_long, (2, 5, 70)))
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-5)
