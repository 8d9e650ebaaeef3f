"""Which room may import what: the arrows of docs/adr/0001, on the source and in a running interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_vllm import cli

HEAVY = {"vllm", "torch", "transformers"}
ROOMS = {"deepinfer_vllm", "deepinfer_kvstore", "deepinfer_costmodel", "deepinfer_router", "deepinfer_simulator"}

# directory: what its modules must not import, not even in a function
FORBIDDEN = {
    "kvstore": HEAVY | ROOMS - {"deepinfer_kvstore"},
    "costmodel": HEAVY | ROOMS - {"deepinfer_costmodel"},
    "router": HEAVY | {"deepinfer_vllm", "deepinfer_simulator"},
    "simulator": HEAVY | {"deepinfer_vllm"},
    "deepinfer_vllm": {"deepinfer_router", "deepinfer_simulator"},
    "deepinfer_vllm/cli": {"vllm"},
}
NAMES_EVERY_ROOM = "cli"  # the one command starts all of them

LIGHT_MODULES = [
    "deepinfer_vllm",
    "deepinfer_vllm.envs",
    "deepinfer_vllm.models.announce",
    "deepinfer_vllm.server_process",
    "deepinfer_vllm.checkpoint.create",
    "deepinfer_vllm.models.deepseek_v41.errors",
    "deepinfer_vllm.platforms",
    "deepinfer_vllm.platforms.tilelang.registration",
    "deepinfer_vllm.doctor.checks",
    "deepinfer_vllm.doctor.fix",
    *(f"deepinfer_vllm.cli.{file.stem}" for file in sorted(Path(cli.__path__[0]).glob("[a-z]*.py"))),
    "deepinfer_kvstore",
    "deepinfer_costmodel",
    "deepinfer_router",
    "deepinfer_simulator",
]


def imported_packages(source: str) -> set[str]:
    """Top-level names of every absolute import in `source`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import torch.nn\ndef f():\n    from deepinfer_router.app import App\nfrom . import vllm\n"
    assert imported_packages(source) == {"torch", "deepinfer_router"}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_room_keeps_to_its_arrows(root: Path, room: str) -> None:
    files = [
        file
        for file in (root / room).rglob("*.py")
        if room.endswith(NAMES_EVERY_ROOM) or file.parent.name != NAMES_EVERY_ROOM
    ]
    assert files
    wrong = {
        str(file.relative_to(root)): forbidden
        for file in files
        if (forbidden := imported_packages(file.read_text()) & FORBIDDEN[room])
    }
    assert wrong == {}


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & {{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == []
