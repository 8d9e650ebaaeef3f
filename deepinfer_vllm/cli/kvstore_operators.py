"""`deepinfer kvstore check`, `repair`, `stats`, `ls` and `purge`: for operators, beside running engines or without."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_vllm.cli.errors import CommandError

if TYPE_CHECKING:
    from deepinfer_kvstore.bare_namespace import BareNamespace
    from deepinfer_kvstore.entry import Entry

Roots = Annotated[
    list[Path], typer.Option("--root", help="The store's directory; with erasure coding, each root in its order.")
]
Name = Annotated[str | None, typer.Option("--namespace", help="16 hex digits: one namespace. Default: all.")]
IndexDir = Annotated[Path | None, typer.Option(help="Local directory of indexes. Default: the engines' of this user.")]
SecretFile = Annotated[Path | None, typer.Option(help="The file with the store's secret, to check who wrote blocks.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tenant = Annotated[str | None, typer.Option(help="Only blocks that this tenant stored.")]
Report = dict[str, Any]


def add_to(group: typer.Typer) -> None:
    """Register the commands."""
    for command in (check, repair, stats, ls, purge):
        group.command()(command)


def check(
    root: Roots,
    namespace: Name = None,
    sample: Annotated[int, typer.Option(min=1, help="Blocks to read, chosen by chance.")] = 1000,
    everything: Annotated[bool, typer.Option("--all", help="Read every slot; finds orphans too.")] = False,
    index_dir: IndexDir = None,
    secret_file: SecretFile = None,
    as_json: Json = False,
) -> None:
    """Read blocks and compare them with their headers, checksums and the index. Exits 1 when one is damaged.

    A damaged block is a miss, never a wrong answer. Orphans are whole blocks that no journal knows.

    Example: deepinfer kvstore check --root /mnt/3fs/kv --all
    """
    from deepinfer_kvstore import reports
    from deepinfer_vllm.cli.kvstore_text import check_lines

    found: list[Report] = []
    with _opened(root, index_dir, namespace) as namespaces:
        secret = _secret(secret_file)
        for each in namespaces:
            with progress_bar("reading slots") as progress:
                found.append(reports.check(each, secret, None if everything else sample, progress))
    _print(found, as_json, check_lines)
    if any(report["damaged"] for report in found):
        raise typer.Exit(1)


def repair(
    root: Roots,
    namespace: Name = None,
    keep_index: Annotated[bool, typer.Option("--keep-index", help="Do not make this node's index again.")] = False,
    index_dir: IndexDir = None,
    secret_file: SecretFile = None,
    as_json: Json = False,
) -> None:
    """Make the index again, delete blocks that are not there, take up whole ones that no journal knows.

    Reads every slot. Engines may run: this node's have misses until its index is made again. Where journals are lost,
    new ones are made from the slabs.

    Example: deepinfer kvstore repair --root /mnt/3fs/kv --namespace 0123456789abcdef
    """
    from deepinfer_kvstore import rebuild, reports
    from deepinfer_vllm.cli.kvstore_text import repair_lines

    found: list[Report] = []
    with _opened(root, index_dir, namespace) as namespaces:
        secret = _secret(secret_file)
        for each in namespaces:
            if not keep_index:
                each.index.begin_anew()
            with (
                progress_bar("reading slots") as progress,
                each.inspector(secret) as looking,
                each.appending() as append,
            ):
                done = rebuild.repair(looking.everything(progress), append)
            each.sync()
            counts = {"adopted": done.adopted, "dropped": dict(done.dropped), "left": dict(done.left)}
            found.append({**reports.named(each), **counts})
    _print(found, as_json, repair_lines)


def stats(
    root: Roots,
    namespace: Name = None,
    ages: Annotated[bool, typer.Option(help="Look at every block for a histogram of ages.")] = True,
    index_dir: IndexDir = None,
    as_json: Json = False,
) -> None:
    """Print how many blocks there are, whose, how long they are kept, how old they are, and what they take.

    Example: deepinfer kvstore stats --root /mnt/3fs/kv --json
    """
    from deepinfer_kvstore import reports
    from deepinfer_vllm.cli.kvstore_text import stats_lines

    found: list[Report] = []
    with _opened(root, index_dir, namespace) as namespaces:
        for each in namespaces:
            with progress_bar("reading the index") as progress:
                found.append(reports.stats(each, progress if ages else None))
    _print(found, as_json, stats_lines)


def ls(
    root: Roots,
    namespace: Name = None,
    oldest: Annotated[bool, typer.Option("--oldest/--newest", help="By last use.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Blocks to print, of each namespace.")] = 20,
    tenant: Tenant = None,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with these hex digits.")] = "",
    index_dir: IndexDir = None,
    as_json: Json = False,
) -> None:
    """List blocks: key, bytes, tokens up to its end, time since last use, tenant's tag, slab and slot.

    Example: deepinfer kvstore ls --root /mnt/3fs/kv --oldest --tenant team-a
    """
    from deepinfer_kvstore import reports
    from deepinfer_kvstore.operators import listing
    from deepinfer_vllm.cli.kvstore_text import ls_lines

    match = _match(tenant, None, prefix)
    found: list[Report] = []
    with _opened(root, index_dir, namespace) as namespaces:
        for each in namespaces:
            with progress_bar("reading the index") as progress:
                chosen = listing(each.index, oldest=oldest, limit=limit, match=match, progress=progress)
            found.append({**reports.named(each), "blocks": [reports.block(*block) for block in chosen]})
    _print(found, as_json, ls_lines)


def purge(
    root: Roots,
    namespace: Name = None,
    tenant: Tenant = None,
    older_than: Annotated[str | None, typer.Option(help="Only blocks not used for so long, as 90m, 36h or 3d.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every block.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="With --all: the files too. No engine may run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    index_dir: IndexDir = None,
    as_json: Json = False,
) -> None:
    """Delete blocks, pinned ones too, with all that continue them. Engines may run; they miss from then on.

    The bytes stay on the disk until slots are written again; --all --remove removes them.

    Example: deepinfer kvstore purge --root /mnt/3fs/kv --tenant team-a --older-than 3d
    """
    from deepinfer_kvstore import gc, reports
    from deepinfer_kvstore.operators import chosen, leases
    from deepinfer_vllm.cli.kvstore_text import purge_lines

    if everything == bool(tenant or older_than):
        raise CommandError("kvstore purge: name what to delete: --tenant and --older-than, or --all")
    if remove and not everything:
        raise CommandError("kvstore purge: --remove goes with --all: files hold blocks of all tenants")
    match = _match(tenant, _age_seconds(older_than), "")
    found: list[Report] = []
    with _opened(root, index_dir, namespace) as namespaces:
        for each in namespaces:
            if remove and any(lease.alive for lease in leases(each.places.writers, shared=each.shared)):
                raise CommandError(f"kvstore purge: --remove: {each.name} has live writers: stop the engines")
            with progress_bar("reading the index") as progress:
                blocks, held = chosen(each.index, match, progress)
            report = {**reports.named(each), "blocks": blocks, "bytes": held, "deleted": 0, "removed": False}
            if not dry_run:
                if not yes:
                    _ask(report, remove)
                with each.appending() as append:
                    report["deleted"] = gc.purge(each.index, append=append, sync=each.sync, match=match)
                if remove:
                    each.remove_files()
                    report["removed"] = True
            found.append(report)
    _print(found, as_json, purge_lines)


def _ask(report: Report, remove: bool) -> None:
    from deepinfer_vllm.cli.kvstore_text import size

    if not sys.stdin.isatty():
        raise CommandError("kvstore purge: nobody can be asked: repeat it with --yes, or look first with --dry-run")
    what = f"{report['blocks']:,} blocks ({size(report['bytes'])}) of {report['model']}"
    typer.confirm(f"Delete {what}, and the files?" if remove else f"Delete {what}?", abort=True, err=True)


@contextmanager
def _opened(root: list[Path], index_dir: Path | None, name: str | None) -> "Iterator[list[BareNamespace]]":
    import logging

    from deepinfer_kvstore.bare_namespace import opened
    from deepinfer_kvstore.errors import StoreConfigError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        with opened(root, index_dir, name) as namespaces:
            yield namespaces
    except StoreConfigError as error:
        raise CommandError(f"kvstore: {error}") from None
    except OSError as error:
        raise CommandError(f"kvstore: {error}: check owner, mount and space") from None


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], object]]:
    """Shows how far a scan is, where somebody looks."""
    with typer.progressbar(length=100, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        yield lambda done, total: bar.update(100 * done // max(total, 1) - bar.pos)


def _secret(path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise CommandError(f"kvstore: --secret-file {path}: {error.strerror}") from None


def _match(tenant: str | None, older_than_s: int | None, prefix: str) -> "Callable[[bytes, Entry], bool]":
    from time import time

    from deepinfer_kvstore.tenants import tenant_tag

    try:
        start = bytes.fromhex(prefix)
    except ValueError:
        raise CommandError(f"kvstore: --prefix {prefix!r}: an even number of hex digits") from None
    tag = None if tenant is None else tenant_tag(tenant)
    before_ms = float("inf") if older_than_s is None else (time() - older_than_s) * 1000

    def match(key: bytes, entry: "Entry") -> bool:
        return key.startswith(start) and tag in (None, entry.tenant) and entry.touched_ms <= before_ms

    return match


def _age_seconds(text: str | None) -> int | None:
    from deepinfer_kvstore.errors import StoreConfigError
    from deepinfer_kvstore.retention import parse_ttl

    if text is None:
        return None
    try:
        found = parse_ttl(f"age={text}")
    except StoreConfigError:
        found = {}
    if list(found) != ["age"] or found["age"] is None:  # `none` is a time to live, and no age: all blocks are younger
        raise CommandError(f"kvstore purge: --older-than {text!r}: a number and s, m, h or d, as in 3d")
    return found["age"]


def _print(found: list[Report], as_json: bool, lines: Callable[[Report], list[str]]) -> None:
    typer.echo(
        json.dumps(found, indent=2) if as_json else "\n".join(line for report in found for line in lines(report))
    )
