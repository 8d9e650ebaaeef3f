"""`deepinfer checkpoint`: write small checkpoints, and verify any against golden values."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="checkpoint",
    help="Write and verify DeepSeek-V4.1 checkpoints.\n\nExample: deepinfer checkpoint tiny /tmp/v41-tiny",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(help="Where to write; made if it does not exist.")],
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    shards: Annotated[int, typer.Option(help="Number of safetensors files.")] = 2,
    preset: Annotated[str, typer.Option(help="tiny, or mid: 1.2 G parameters, 2.4 GB in bf16.")] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Stretch the preset to that many layers.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or float32.")] = "bf16",
    vision: Annotated[bool, typer.Option("--vision", help="Add a small vision tower, for images.")] = False,
    quant: Annotated[bool, typer.Option("--quant", help="fp8 linears, fp4 experts: as published.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace weights that the directory holds.")] = False,
) -> None:
    """Write a small V4.1 checkpoint of random weights, with tokenizer, in the published form.

    Example: deepinfer checkpoint tiny /tmp/v41-tiny --vision --quant
    """
    with _one_line_errors("tiny", OSError):
        from deepinfer_vllm.checkpoint.create import create

        with typer.progressbar(length=100, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
            made = create(
                directory,
                name=preset,
                layers=layers,
                seed=seed,
                shards=shards,
                dtype=dtype,
                vision=vision,
                quant=quant,
                force=force,
                progress=lambda done, total: bar.update(100 * done // total - bar.pos),
            )
    typer.echo(f"{made.directory}: {made.parameters:,} parameters, {made.size_bytes / 1e6:.1f} MB")


@app.command()
def trained(
    directory: Annotated[Path | None, typer.Argument(help="Where to write; made if it does not exist.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or float32; the values are the same.")] = "bf16",
    force: Annotated[bool, typer.Option("--force", help="Replace weights that the directory holds.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Also write prompts, held out from training: JSON lines.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many prompts; kinds of text in turn.")] = 48,
    tokens: Annotated[int, typer.Option(help="Tokens of each prompt, but for shorter texts.")] = 64,
    workload: Annotated[list[str] | None, typer.Option(help="Only this kind of text; may be repeated.")] = None,
    first: Annotated[int, typer.Option(help="Number of the first text of each kind.")] = 0,
) -> None:
    """Write the trained pair, a tiny V4.1 whose DSpark drafts are often right, or prompts for it, or both.

    Kinds of text: records, code, lists, sums, prose, noise.

    Example: deepinfer checkpoint trained /tmp/v41-pair --prompts /tmp/prompts.jsonl --count 16
    """
    with _one_line_errors("trained", OSError):
        from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
        from deepinfer_vllm.training.prompts import held_out_prompts, write_prompts
        from deepinfer_vllm.training.shipped import write_trained
        from deepinfer_vllm.training.texts import WORKLOADS

        if directory is None and prompts is None:
            raise CheckpointError("nothing to write: give a directory, or --prompts FILE")
        made = held_out_prompts(count, workloads=workload or tuple(WORKLOADS), tokens=tokens, first=first)
        if directory is not None:
            created = write_trained(directory, dtype=dtype, force=force)
            typer.echo(f"{directory}: {created.parameters:,} parameters, {created.size_bytes / 1e6:.1f} MB")
        if prompts is not None:
            write_prompts(prompts, made)
            typer.echo(f"{prompts}: {len(made)} prompts")


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Where to write checkpoint and card.json; made if it does not exist.")],
    target_steps: Annotated[int | None, typer.Option(help="Default: as many as the shipped pair's target had.")] = None,
    draft_steps: Annotated[int | None, typer.Option(help="Default: as many as its draft layers had.")] = None,
    seed: Annotated[int, typer.Option(help="Of first weights and texts.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace weights that the directory holds.")] = False,
) -> None:
    """Train the pair anew on made-up texts: some minutes of an idle core, with lines of progress.

    Runs on one thread unless OMP_NUM_THREADS is set, and another number of threads gives other last bits.

    Example: deepinfer checkpoint train --out /tmp/v41-pair
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _one_line_errors("train", OSError):
        from dataclasses import replace

        from deepinfer_vllm.training.run import make_pair
        from deepinfer_vllm.training.train import Recipe

        given = {"target_steps": target_steps, "draft_steps": draft_steps}
        recipe = replace(Recipe(seed=seed), **{name: steps for name, steps in given.items() if steps is not None})
        make_pair(out, recipe, force=force, report=typer.echo)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="A checkpoint with golden.json and golden*.safetensors.")],
    backend: Annotated[str, typer.Option(help="bare (the module alone), engine (vLLM's LLM), or both.")] = "both",
    numerics: Annotated[str, typer.Option(help="plain, qat (KV rounded as in training), or all there is.")] = "all",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    all_rows: Annotated[bool, typer.Option("--all", help="Print every comparison, not the worst of a kind.")] = False,
) -> None:
    """Compare the model's answers with a checkpoint's golden values. Exits 1 when one is outside its limit.

    Runs on one thread unless OMP_NUM_THREADS is set: golden checkpoints are small.

    Example: deepinfer checkpoint verify tests/golden/v41-tiny-a --backend bare
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of a tiny model wait for each other most of the time
    with _one_line_errors("verify"):
        from deepinfer_vllm.checkpoint.verify import run

        code = run(directory, backend=backend, numerics=numerics, dtype=dtype, all_rows=all_rows)
    raise typer.Exit(code)


@contextmanager
def _one_line_errors(command: str, *also: type[Exception]) -> Iterator[None]:
    """What the user can act on ends the command with one line and exit code 2; anything else is a bug and shows."""
    from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError

    expected: tuple[type[Exception], ...] = (CheckpointError, *also)
    try:
        yield
    except expected as error:
        typer.echo(f"deepinfer checkpoint {command}: {error}", err=True)
        raise typer.Exit(2) from None
