"""`deepinfer router`: one address in front of many engines."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_vllm.cli.errors import CommandError


def router(
    config: Annotated[Path | None, typer.Option(help="YAML file; docs/router.md lists what it may say.")] = None,
    engines: Annotated[str | None, typer.Option(help="Engines that do whole requests: URLs, with commas.")] = None,
    prefill: Annotated[str | None, typer.Option(help="Engines that only prefill.")] = None,
    decode: Annotated[str | None, typer.Option(help="Engines that only decode.")] = None,
    encode: Annotated[str | None, typer.Option(help="Engines that only encode images.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT for clients. Default: 127.0.0.1:8080.")] = None,
    admin: Annotated[
        str | None, typer.Option(help="HOST:PORT of metrics and status page; '' for none. Default: 127.0.0.1:9401.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that serve, one a core. Default: 1.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every setting as it is, and end.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Say whether the configuration can work, and end.")] = False,
) -> None:
    """Route requests to vLLM engines until SIGTERM. SIGHUP reads engines and API keys again.

    Options override the file. With engines named here, of whatever role, the file's list of engines does not count.

    Example: deepinfer router --engines http://10.0.0.1:8000,http://10.0.0.2:8000 --listen 0.0.0.0:8080
    """
    from deepinfer_router.config_source import ConfigSource
    from deepinfer_router.errors import RouterConfigError
    from deepinfer_router.startup import prepare, summary

    over: dict[str, Any] = {}
    named = [
        {"url": url, "roles": roles}
        for urls, roles in (
            (engines, ["prefill", "decode"]),
            (prefill, ["prefill"]),
            (decode, ["decode"]),
            (encode, ["encode"]),
        )
        for url in filter(None, (part.strip() for part in (urls or "").split(",")))
    ]
    if named:
        over["engines"] = named
    for name, value in (("listen", listen), ("admin.listen", admin), ("process.workers", workers)):
        if value is not None:
            over[name] = value
    source = ConfigSource(config.absolute() if config else None, over)
    try:
        settings, boot = prepare(source)
    except RouterConfigError as error:
        raise CommandError(f"router: {error}") from None
    if print_config:
        import yaml

        yaml.safe_dump(settings.model_dump(mode="json"), sys.stdout, sort_keys=False)
        return
    typer.echo(f"deepinfer: router: {summary(settings)}", err=not check)
    if check:
        return
    from deepinfer_router.supervise import replace_process

    try:
        replace_process(boot)
    except OSError as error:
        raise CommandError(f"router: cannot start: {error.strerror}") from None
