"""The `deepinfer` command: help, version, and errors of one line."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from deepinfer_vllm import __version__
from deepinfer_vllm.cli import main
from deepinfer_vllm.cli.errors import CommandError


def commands(command: Any, path: str = "deepinfer") -> Iterator[tuple[str, Any]]:
    """Every command and group below `command`, with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


ALL = dict(commands(typer.main.get_command(main.app)))


def test_the_commands_are_found() -> None:
    assert "deepinfer doctor" in ALL


@pytest.mark.parametrize("path", ALL)
def test_every_command_has_help_with_an_example(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*path.split()[1:], "--help"]) == 0
    assert f"Usage: {path}" in capsys.readouterr().out
    assert "Example: deepinfer" in ALL[path].help


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"deepinfer {__version__}\n"


@pytest.mark.parametrize("arguments", [["frobnicate"], ["doctor", "--frobnicate"], ["doctor", "now"], ["--version=3"]])
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) != 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("deepinfer: ") and output.err.count("\n") == 1


def test_command_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def fails() -> None:
        raise CommandError("no such directory: x;\n  make it first")

    @app.callback()
    def several() -> None:
        """With a callback the app keeps its command's name."""

    monkeypatch.setattr(main, "app", app)
    assert main.run(["fails"]) == 1
    assert capsys.readouterr().err == "deepinfer: no such directory: x; make it first\n"


def test_the_installed_script_runs() -> None:
    script = Path(sys.executable).with_name("deepinfer")
    done = subprocess.run([script, "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "deepinfer: No such command 'nonsense'.\n"


@pytest.mark.parametrize("arguments", [["checkpoint", "tiny", "x"], ["demo"]])
def test_without_vllm_a_command_says_what_it_needs(arguments: list[str], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules.update(torch=None, openai=None, vllm=None)\n"
        f"from deepinfer_vllm.cli.main import run; sys.exit(run({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "comes with vLLM: pip install" in done.stderr
