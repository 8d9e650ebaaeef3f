"""`deepinfer simulate decode` and `prefill`: what balancing policies are worth, in fleets of virtual time."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from deepinfer_vllm.cli.errors import CommandError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from deepinfer_simulator.traces import TraceRequest

app = typer.Typer(
    name="simulate",
    help="Try policies of the router on simulated engines.\n\nExample: deepinfer simulate decode --replicas 8",
    no_args_is_help=True,
)

Trace = Annotated[
    Path | None,
    typer.Option(
        help="JSON Lines as Mooncake's or CSV as Azure's, gzipped or not. Default: sessions of agents, made up."
    ),
]
Lengths = Annotated[float, typer.Option(min=0.01, max=1000, help="Prompts so many times as long as in the trace.")]
Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Runs of each policy, which differ by chance.")]
Config = Annotated[
    Path | None,
    typer.Option(help="The router's YAML file, for its sections `prefill` and `decode`. Default: defaults."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with every run.")]
Plot = Annotated[Path | None, typer.Option(help="Write bars to this SVG file.")]
Model = TypeVar("Model", bound="BaseModel")
Row = tuple[str, list[dict[str, Any]]]


@app.command()
def decode(
    trace: Trace = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Which, once for each. Default: router, least-requests and round-robin.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Data-parallel ranks that step together.")] = 64,
    per_rank: Annotated[int, typer.Option(min=1, max=10_000, help="Requests of a rank in flight.")] = 60,
    replicas: Annotated[int, typer.Option(min=1, max=256, help="Routers that see each other by polls only.")] = 1,
    poll: Annotated[
        float, typer.Option(min=0, max=60, help="Seconds between polls of loads; 0, of others than router: no delay.")
    ] = 0.2,
    steps: Annotated[int, typer.Option(min=30, max=1_000_000, help="Decode steps; the first third warms up.")] = 2500,
    lengths: Lengths = 1.0,
    seeds: Seeds = 2,
    config: Config = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Balance of decode: mean over slowest rank, 1 is perfect, and throughput goes with it.

    Example: deepinfer simulate decode --trace conversation.jsonl.gz --replicas 8 --policy router --policy random
    """
    from deepinfer_router.decode_config import DecodeConfig
    from deepinfer_simulator.decode_case import POLICIES, ROUTER, DecodeCase

    chosen = _chosen(policy or [ROUTER, "least-requests", "round-robin"], POLICIES)
    if ROUTER in chosen and not poll:
        raise CommandError("simulate: --poll 0: the router polls; give it a time above 0, or only --policy of others")
    settings = _section(config, "decode", DecodeConfig)
    if settings is not None and "replicas" not in settings.model_fields_set:
        settings = settings.model_copy(update={"replicas": replicas})
    requests = _requests(trace, lengths)
    if not any(request.output_tokens for request in requests):
        raise CommandError(f"simulate: {trace}: no request has output: nothing is decoded")
    case = DecodeCase(ranks=ranks, replicas=replicas, poll_s=poll, per_rank=per_rank, steps=steps, config=settings)
    rows = _run(
        chosen, seeds, lambda name, seed, progress: asdict(replace(case, policy=name).run(requests, seed, progress))
    )
    columns: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("balance", lambda run: run["eta"]),
        ("tokens/s a rank", lambda run: run["tokens_per_second"]),
        ("spread of requests", lambda run: run["requests_spread"]),
        ("spread of KV tokens", lambda run: run["kv_spread"]),
    ]
    _print(rows, columns, as_json, plot, f"decode balance, {ranks} ranks, {replicas} routers")


@app.command()
def prefill(
    trace: Trace = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Which, once for each. Default: router, least-work and round-robin.")
    ] = None,
    engines: Annotated[int, typer.Option(min=1, max=1024, help="Engines of equal kind.")] = 16,
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Of each, which step together.")] = 4,
    chunks: Annotated[
        str, typer.Option(help="Of a step: fixed (8,192 tokens), budget (0.2 s) or whole (a prompt).")
    ] = "fixed",
    load: Annotated[float, typer.Option(min=0.01, max=2, help="Share of what ranks compute that never wait.")] = 0.65,
    seconds: Annotated[float, typer.Option(min=10, max=1e6, help="For which prompts arrive; a tenth warms up.")] = 600,
    shift: Annotated[
        bool, typer.Option("--shift", help="Prompts of 64K and more come four times as often every second 5 minutes.")
    ] = False,
    lengths: Lengths = 1.0,
    seeds: Seeds = 2,
    config: Config = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Seconds to the first token, by length of prompts. A drift above 1.5: queues grow, and times with them.

    Costs are those of `prefill.costs_file` of --config, else some that rank policies and predict no machine.

    Example: deepinfer simulate prefill --trace conversation.jsonl.gz --lengths 2.5 --policy router --policy least-work
    """
    from deepinfer_router.engine_costs import EngineCosts
    from deepinfer_router.errors import RouterConfigError
    from deepinfer_router.prefill_config import PrefillConfig
    from deepinfer_simulator.prefill_case import CHUNKS, POLICIES, ROUTER, PrefillCase
    from deepinfer_simulator.traces import with_hits

    chosen = _chosen(policy or [ROUTER, "least-work", "round-robin"], POLICIES)
    if chunks not in CHUNKS:
        raise CommandError(f"simulate: --chunks {chunks!r}: one of {', '.join(CHUNKS)}")
    settings = _section(config, "prefill", PrefillConfig)
    case = PrefillCase(
        engines=engines, ranks=ranks, chunks=chunks, load=load, seconds=seconds, shift=shift, config=settings
    )
    if settings is not None and settings.costs_file is not None:
        try:
            case = replace(case, cost=EngineCosts.from_config(settings).of(""))
        except RouterConfigError as error:
            raise CommandError(f"simulate: {error}") from None
    requests = with_hits(_requests(trace, 1.0))
    requests = _scaled(requests, lengths)
    try:
        rows = _run(chosen, seeds, lambda name, seed, progress: asdict(replace(case, policy=name).run(requests, seed)))
    except ValueError as error:
        raise CommandError(f"simulate: {error}") from None
    columns: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("mean s", lambda run: run["mean_s"]),
        ("<16K p99", lambda run: _p99(run["groups"][0])),
        ("16K-64K p99", lambda run: _p99(run["groups"][1])),
        ("64K-256K p99", lambda run: _p99(run["groups"][2])),
        (">=256K p99", lambda run: _p99(run["groups"][3])),
        ("drift", lambda run: run["drift"]),
        ("lock-step efficiency", lambda run: run["efficiency"]),
        ("moves/min", lambda run: run["moves_per_minute"]),
    ]
    _print(rows, columns, as_json, plot, f"mean seconds to first token, load {load:g}, {chunks} chunks")


def _p99(group: dict[str, Any]) -> float:
    """Of a group's prompts; NaN: there were none."""
    return group["p99_s"] if group["prompts"] else nan


def _chosen(names: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise CommandError(f"simulate: --policy {name!r}: one of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _section(path: Path | None, name: str, model: type[Model]) -> Model | None:
    from pydantic import ValidationError

    from deepinfer_router.config_errors import one_line
    from deepinfer_router.config_source import read_yaml
    from deepinfer_router.errors import RouterConfigError

    if path is None:
        return None
    try:
        settings = read_yaml(path)
        return model.model_validate((settings or {}).get(name) or {})
    except RouterConfigError as error:
        raise CommandError(f"simulate: {error}") from None
    except ValidationError as error:
        raise CommandError(f"simulate: {path}: {name}: {one_line(error, model)}") from None
    except AttributeError:
        raise CommandError(f"simulate: {path}: not the router's configuration: sections by name are wanted") from None


def _requests(trace: Path | None, lengths: float) -> "list[TraceRequest]":
    from random import Random

    from deepinfer_simulator.agent_sessions import agent_sessions
    from deepinfer_simulator.traces import TraceError, read

    try:
        return _scaled(agent_sessions(200, 600.0, Random(0)) if trace is None else read(trace), lengths)
    except TraceError as error:
        raise CommandError(f"simulate: {error}") from None


def _scaled(requests: "list[TraceRequest]", lengths: float) -> "list[TraceRequest]":
    from deepinfer_simulator.traces import scaled

    return requests if lengths == 1.0 else scaled(requests, lengths)


def _run(
    names: Sequence[str], seeds: int, run: Callable[[str, int, Callable[[int, int], object]], dict[str, Any]]
) -> list[Row]:
    rows: list[Row] = []
    length, begun = 1000 * len(names) * seeds, 0
    with typer.progressbar(length=length, label="simulating", file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:

        def show(done: int, total: int) -> None:
            bar.update(begun + 1000 * done // total - bar.pos)

        for name in names:
            runs = []
            for seed in range(1, seeds + 1):
                runs.append(run(name, seed, show))
                show(1, 1)
                begun += 1000
            rows.append((name, runs))
    return rows


def _print(
    rows: Sequence[Row],
    columns: Sequence[tuple[str, Callable[[dict[str, Any]], float]]],
    as_json: bool,
    plot: Path | None,
    title: str,
) -> None:
    from deepinfer_simulator.bars import svg

    values = [(name, [fmean(of(run) for run in runs) for _, of in columns]) for name, runs in rows]
    if plot is not None:
        try:
            plot.write_text(svg(title, [(name, numbers[0]) for name, numbers in values]))
        except OSError as error:
            raise CommandError(f"simulate: --plot {plot}: {error.strerror}") from None
    if as_json:
        typer.echo(json.dumps([{"policy": name, "runs": runs} for name, runs in rows], indent=2))
        return
    width = max(len("policy"), *(len(name) for name, _ in rows))
    typer.echo("  ".join(["policy".ljust(width), *(label for label, _ in columns)]))
    for name, numbers in values:
        cells = [
            ("-" if isnan(number) else f"{number:.3f}").rjust(len(label))
            for number, (label, _) in zip(numbers, columns, strict=True)
        ]
        typer.echo("  ".join([name.ljust(width), *cells]))
