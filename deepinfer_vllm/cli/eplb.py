"""`deepinfer eplb`: what recorded loads of experts come to under another placement."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_vllm.cli.errors import CommandError

if TYPE_CHECKING:
    from deepinfer_vllm.eplb.analysis import Row

app = typer.Typer(
    name="eplb",
    help="Look at the balance of experts.\n\nExample: deepinfer eplb analyze loads.npz --ranks 8",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    """Look at the balance of experts.

    Example: deepinfer eplb analyze loads.npz --ranks 8
    """


@app.command()
def analyze(
    trace: Annotated[
        Path,
        typer.Argument(help="What an engine recorded with DEEPINFER_VLLM_EPLB_RECORD=FILE.", show_default=False),
    ],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of the expert-parallel group. Default: the trace's.")
    ] = None,
    redundant: Annotated[
        int | None, typer.Option(min=0, help="Redundant experts on all ranks. Default: the trace's, or one a rank.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Keep an expert's replicas on one of so many nodes.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="PNG to draw. Default: beside the trace.")] = None,
) -> None:
    """Say how unequal the loads of ranks are, layer by layer, and what other placements would give.

    moe_lb is the sum over steps of the slowest rank over that of the mean, on the second half of the trace: 1.10 means
    that a step takes 10 % longer than with equal loads. static: with vLLM's first layout; placed: with a placement made
    from the first half; hindsight: made from the second; floor: if only the draw of tokens made ranks unequal.

    Example: deepinfer eplb analyze loads.npz --ranks 8 --redundant 8 --plot loads.png
    """
    from deepinfer_vllm.eplb import trace as traces
    from deepinfer_vllm.eplb.analysis import analyse
    from deepinfer_vllm.eplb.errors import EplbError
    from deepinfer_vllm.eplb.picture import draw

    try:
        read = traces.read(trace)
        experts = read.counts.shape[2]
        ranks = ranks or _whole(read.meta.get("ranks"))
        if ranks is None:
            raise EplbError(f"{trace} does not say how many ranks there were; give --ranks")
        recorded = _whole(read.meta.get("physical")) or experts + ranks
        physical = recorded if redundant is None else experts + redundant
        physical = -(-physical // ranks) * ranks
        if sys.stderr.isatty():
            typer.echo("Placing experts; the first time, what does it is compiled, for half a minute.", err=True)
        together, layers = analyse(read.counts, ranks, physical, nodes)
        for line in _table(together, layers):
            typer.echo(line)
        picture = plot or trace.with_suffix(".png")
        series = ("static", "placed", "hindsight", "floor")
        draw(
            picture,
            f"moe_lb by layer, {ranks} ranks, {physical} slots",
            {str(number): {name: getattr(row, name) for name in series} for number, row in enumerate(layers)},
        )
    except EplbError as error:
        raise CommandError(f"eplb analyze: {error}") from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CommandError(f"eplb analyze: {where}{error.strerror or error}") from None
    steps = len(read.counts)
    typer.echo(f"{steps:,} steps, {len(layers)} layers, {experts} experts in {physical} slots on {ranks} ranks.")
    typer.echo(f"Wrote {picture}.")


def _whole(value: object) -> int | None:
    """A number of a trace's meta; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _table(together: "Row", layers: "list[Row]") -> list[str]:
    """A row a layer; columns as `Row` has them."""
    lines = [f"{'layer':>5}  {'hottest':>8}  {'static':>7}  {'placed':>7}  {'hindsight':>9}  {'floor':>7}"]
    for name, row in [*((str(number), row) for number, row in enumerate(layers)), ("all", together)]:
        balance = f"{row.static:>7.4f}  {row.placed:>7.4f}  {row.hindsight:>9.4f}  {row.floor:>7.4f}"
        lines.append(f"{name:>5}  {row.hottest:>7.1f}x  {balance}")
    return lines
