"""`deepinfer sweep`: throughput against latency of a server, over a grid of loads."""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_vllm.cli.errors import CommandError

if TYPE_CHECKING:
    from deepinfer_vllm.evaluation.sweep_run import Json, Progress

START_LIMIT_SECONDS = 3600


def sweep(
    context: typer.Context,
    url: Annotated[str | None, typer.Argument(help="Of a server, or of the router.", show_default=False)] = None,
    serve: Annotated[
        str | None, typer.Option(help="Instead: start `vllm serve` with these words, and stop it afterwards.")
    ] = None,
    rates: Annotated[str, typer.Option(help="Requests a second, with commas; inf: all at once.")] = "inf",
    concurrency: Annotated[str, typer.Option(help="Requests at a time at most, with commas. Default: no limit.")] = "",
    input_len: Annotated[str, typer.Option(help="Tokens of prompts, with commas. Default: the dataset's.")] = "",
    output_len: Annotated[str, typer.Option(help="Tokens of answers, with commas. Default: the dataset's.")] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Requests of each point.")] = 200,
    slo: Annotated[str, typer.Option(help="Milliseconds for goodput, of ttft, tpot and e2el: ttft:2000,tpot:50.")] = "",
    bench: Annotated[
        str, typer.Option(help="More words for `vllm bench serve`: its dataset, tokenizer, headers, ...")
    ] = "--ignore-eos",
    seed: Annotated[int, typer.Option(help="Of prompts and of the times at which they come.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of points.jsonl, sweep.json, sweep.png and logs.")] = Path("sweep"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of continuing.")] = False,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Without the picture, which needs matplotlib.")] = False,
) -> None:
    """Run `vllm bench serve` over a grid of loads and lengths; draw throughput against latency.

    A run that was ended, however, continues with the same command: it measures what the folder lacks. A point that
    fails does not end it; the exit code is 1 then, and the next run tries it again.

    Example: deepinfer sweep http://127.0.0.1:8000 --rates 1,2,4,inf --input-len 512,4096 --output-len 128 --slo tpot:50
    """
    if (url is None) == (serve is None):
        raise CommandError('sweep: give either the URL of a server, or --serve "MODEL ..."')
    from deepinfer_vllm.evaluation import sweep_run
    from deepinfer_vllm.evaluation.errors import EvaluationError
    from deepinfer_vllm.evaluation.sweep_grid import grid, objectives
    from deepinfer_vllm.evaluation.sweep_plot import need_matplotlib, plot
    from deepinfer_vllm.server_process import ServerError

    try:
        points, limits = grid(rates, concurrency, input_len, output_len), objectives(slo)
        more = _words("--bench", bench)
        if not no_plot:
            need_matplotlib()
        words = _words("--serve", serve) if serve is not None else []
        if url is None and (not words or words[0].startswith("-") or {"--host", "--port"} & {*words}):
            raise CommandError(f"sweep: --serve {serve!r}: a model comes first, and --host and --port are chosen here")
        start = partial(_running, url.rstrip("/")) if url is not None else partial(_served, words, out / "server.log")
        with _terminable(), _bar(len(points)) as show:
            whole = sweep_run.sweep(
                start,
                url or f"vllm serve {serve}",
                points,
                limits,
                prompts=prompts,
                seed=seed,
                more=more,
                out=out,
                fresh=fresh,
                called=["deepinfer", *context.obj],
                progress=show,
            )
        for line in table(whole["points"]):
            typer.echo(line)
        if not no_plot:
            plot(whole, out / "sweep.png")
    except KeyboardInterrupt:
        typer.echo(f"deepinfer: sweep: interrupted; points are in {out}, and the same command continues", err=True)
        raise typer.Exit(130) from None
    except EvaluationError as error:
        raise CommandError(f"sweep: {error}") from None
    except ServerError as error:
        told = " ".join(str(error).splitlines()[:2])  # then comes the log
        raise CommandError(f"sweep: {told}; see {out / 'server.log'}") from None
    typer.echo(f"{out / 'sweep.json'}" + ("" if no_plot else f", {out / 'sweep.png'}"))
    failed = [point for point in whole["points"] if "error" in point]
    if failed:
        raise CommandError(
            f"sweep: {len(failed)} of {len(points)} points failed; {failed[0]['name']}: {failed[0]['error']}"
        )


def table(points: "list[Json]") -> list[str]:
    """A row a point."""
    width = max(len(point["name"]) for point in points)
    head = ("req/s", "goodput", "tok/s", "TTFT p50", "p99 ms", "ITL p50", "p99 ms")
    rows = [f"{'point':<{width}}" + "".join(f"{label:>10}" for label in head)]
    names = ["request_throughput", "request_goodput", "output_throughput"]
    names += [f"p{p}_{metric}_ms" for metric in ("ttft", "itl") for p in (50, 99)]
    for point in points:
        cells = (point.get(name) for name in names)
        told = "  failed" if "error" in point else "".join(f"{'-' if c is None else f'{c:.2f}':>10}" for c in cells)
        rows.append(f"{point['name']:<{width}}{told}")
    return rows


def _words(flag: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CommandError(f"sweep: {flag} {text!r}: {error}") from None


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what was started too, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _running(url: str) -> Iterator[str]:
    yield url


@contextmanager
def _served(words: list[str], log: Path) -> Iterator[str]:
    """The address of a server that lives as long as this."""
    from deepinfer_vllm.server_process import ServerProcess

    with ServerProcess(Path(words[0]), log, words[1:], {}) as server:
        server.wait_until_healthy(START_LIMIT_SECONDS)
        yield server.url


@contextmanager
def _bar(length: int) -> "Iterator[Progress]":
    with typer.progressbar(length=length, label="sweep", file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:

        def show(done: int, name: str) -> None:
            bar.label = name or "sweep"
            bar.update(done - bar.pos)
            bar.render_progress()

        yield show
