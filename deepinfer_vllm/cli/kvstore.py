"""`deepinfer kvstore`: the store's daemon; commands for operators are registered on the same group."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from deepinfer_vllm.cli.errors import CommandError

if TYPE_CHECKING:
    from deepinfer_kvstore.daemon import Address, Daemon

app = typer.Typer(
    name="kvstore",
    rich_markup_mode=None,
)

MIN_TOKEN_BYTES = 16


@app.callback(invoke_without_command=True)
def daemon(
    context: typer.Context,
    root: Annotated[
        list[Path] | None, typer.Option(help="The store's directory; with erasure coding, each root in its order.")
    ] = None,
    roles: Annotated[str, typer.Option(help="What to do, separated by commas.")] = "check,index,gc",
    socket: Annotated[Path | None, typer.Option(help="CHECK's unix socket. Default: where clients look.")] = None,
    index_dir: Annotated[Path | None, typer.Option(help="Local directory of indexes. Default: the engines'.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to answer CHECK on over TCP.")] = None,
    swa_listen: Annotated[str | None, typer.Option(help="HOST:PORT of the snapshots' directory (role swa).")] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file with what TCP clients must show.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain for TCP, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="TCP without TLS: token and answers in the clear.")
    ] = False,
    metrics: Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus.")] = None,
) -> None:
    """Serve every namespace below --root until SIGTERM: answer CHECK, keep the index, collect.

    Example: deepinfer kvstore --root /mnt/3fs/kv --metrics 127.0.0.1:9400
    """
    if context.invoked_subcommand is not None:
        return
    if not root:
        raise CommandError("kvstore: --root is missing: name the store's directory, or a command (--help lists them)")
    from deepinfer_kvstore.daemon import DaemonOptions, serve
    from deepinfer_kvstore.errors import StoreConfigError
    from deepinfer_kvstore.host_port import host_port
    from deepinfer_kvstore.roles import ROLES

    chosen = [role for role in (name.strip() for name in roles.split(",")) if role]
    if unknown := [role for role in chosen if role not in ROLES]:
        raise CommandError(f"kvstore: --roles {unknown[0]!r} is unknown: there are {', '.join(ROLES)}")
    if not chosen:
        raise CommandError(f"kvstore: --roles is empty: name some of {', '.join(ROLES)}")
    secrets = _Secrets(token_file, tls_cert, tls_key, insecure)
    if secrets != _Secrets() and not (listen or swa_listen):
        raise CommandError(
            "kvstore: --token-file, --tls-cert, --tls-key and --insecure go with --listen or --swa-listen"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        options = DaemonOptions(
            root=root[0],
            more_roots=root[1:],
            roles=chosen,
            index_dir=index_dir,
            socket=socket,
            listen=_address("--listen", listen, secrets),
            swa_listen=_address("--swa-listen", swa_listen, secrets),
            metrics=host_port("--metrics", metrics) if metrics else None,
        )
        serve(options, _say_started)
    except StoreConfigError as error:
        raise CommandError(f"kvstore: {error}") from None


def _say_started(started: "Daemon") -> None:
    names = [namespace.name for namespace in started.namespaces.all()]
    typer.echo(f"kvstore: serving {started.options.root} ({', '.join(started.options.roles)}): {len(names)} namespaces")


class _Secrets(NamedTuple):
    """Options for what listens on TCP."""

    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False


def _address(option: str, listen: str | None, secrets: _Secrets) -> "Address | None":
    if listen is None:
        return None
    import ssl

    from deepinfer_kvstore.daemon import Address
    from deepinfer_kvstore.host_port import host_port

    token_file, tls_cert, tls_key, insecure = secrets
    host, port = host_port(option, listen)
    if token_file is None:
        raise CommandError(f"kvstore: {option} needs --token-file: whoever asks learns what others have asked")
    if (tls_cert is None) != (tls_key is None):
        raise CommandError("kvstore: --tls-cert and --tls-key go together")
    if (tls_cert is None) != insecure:
        raise CommandError(f"kvstore: {option} needs either --tls-cert and --tls-key, or --insecure")
    try:
        token = token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"kvstore: --token-file {token_file}: {error}") from None
    if len(token.encode()) < MIN_TOKEN_BYTES:
        raise CommandError(
            f"kvstore: --token-file {token_file}: shorter than {MIN_TOKEN_BYTES} bytes: make a longer one"
        )
    tls = None
    if tls_cert and tls_key:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            tls.load_cert_chain(tls_cert, tls_key)
        except (OSError, ssl.SSLError) as error:
            raise CommandError(f"kvstore: --tls-cert {tls_cert}, --tls-key {tls_key}: {error}") from None
    return Address(host, port, token, tls)
