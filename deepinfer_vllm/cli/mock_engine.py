"""`deepinfer mock-engine`: engines without a model, for trying out a router and its configuration."""

from typing import Annotated, Any

import typer

from deepinfer_vllm.cli.errors import CommandError


def mock_engine(
    port: Annotated[int, typer.Option(help="Of the first engine; 0: any free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    engines: Annotated[int, typer.Option(help="How many, on ports after the first.")] = 1,
    model: Annotated[list[str] | None, typer.Option(help="A name to serve; may be repeated. Default: mock.")] = None,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks of each engine.")] = 1,
    capacity_tokens: Annotated[int, typer.Option(help="KV tokens a rank has room for.")] = 1 << 22,
    max_sequences: Annotated[int, typer.Option(help="Requests that run at once in a rank.")] = 1024,
    max_waiting: Annotated[int | None, typer.Option(help="More waiting ones are a 503. Default: no limit.")] = None,
    time_scale: Annotated[float, typer.Option(help="1: the latency of a real engine; 0: none.")] = 1.0,
    connector: Annotated[str, typer.Option(help="How prefill and decode are split: none, nixl or mooncake.")] = "none",
    lease_s: Annotated[float, typer.Option(help="Seconds that computed blocks wait for a decode engine.")] = 30.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="KIND or KIND:NAME=NUMBER,...; may be repeated. An unknown KIND lists them."),
    ] = None,
) -> None:
    """Serve vLLM's API without a model: each answer is a function of its prompt, latency follows cost(q, c).

    POST /mock/faults {"kind": "reset_mid", "times": 1} makes it fail, DELETE lifts that; /mock/state counts.

    Example: deepinfer mock-engine --engines 2 --port 8001 --fault stall_mid:times=1,after_events=3
    """
    from deepinfer_simulator.engine_config import EngineConfig
    from deepinfer_simulator.engine_process import serve

    if connector not in ("none", "nixl", "mooncake"):
        raise CommandError(f"mock-engine: --connector {connector!r} is unknown: there are none, nixl, mooncake")
    for name, value in (("--engines", engines), ("--ranks", ranks), ("--max-sequences", max_sequences)):
        if value < 1:
            raise CommandError(f"mock-engine: {name} {value}: must be at least 1")
    if not 0 <= port <= 65535 - engines:
        raise CommandError(f"mock-engine: --port {port}: must be between 0 and {65535 - engines}")
    config = EngineConfig(
        models=tuple(model or ("mock",)),
        ranks=ranks,
        capacity_tokens=capacity_tokens,
        max_sequences=max_sequences,
        max_waiting=max_waiting,
        time_scale=time_scale,
        connector=connector,  # type: ignore[arg-type]
        lease_s=lease_s,
    )
    faults = [_fault(text) for text in fault or ()]
    ports = [port + number if port else 0 for number in range(engines)]
    try:
        serve(config, host, ports, faults, typer.echo)
    except OSError as error:
        raise CommandError(f"mock-engine: {host}:{port}: {error.strerror}: choose another --port") from None


def _fault(text: str) -> dict[str, Any]:
    from deepinfer_simulator.engine_faults import Fault

    kind, _, rest = text.partition(":")
    try:
        how: dict[str, Any] = {}
        for pair in filter(None, rest.split(",")):
            name, _, value = pair.partition("=")
            how[name] = float(value) if "." in value else int(value)
        Fault(kind, **how)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise CommandError(f"mock-engine: --fault {text}: {error}") from None
    return {"kind": kind, **how}
