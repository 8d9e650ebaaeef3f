"""`deepinfer kvstore rebuild`: make a lost root of an erasure-coded store again."""

from pathlib import Path
from typing import Annotated

import typer

from deepinfer_vllm.cli.errors import CommandError
from deepinfer_vllm.cli.kvstore_operators import progress_bar


def rebuild(
    root: Annotated[list[Path], typer.Option("--root", help="A root that is there. Name all of them.")],
    onto: Annotated[Path, typer.Option(help="An empty directory: the new root.", show_default=False)],
    number: Annotated[
        int | None, typer.Option(min=0, help="Which root to make, counted from 0. Default: the first that is lost.")
    ] = None,
) -> None:
    """Make a lost root of an erasure-coded store again, from the others. Engines may run meanwhile.

    Engines use it once they are started with it among their roots, in the place that is printed at the end.

    Example: deepinfer kvstore rebuild --root /disk0/kv --root /disk2/kv --root /disk3/kv --onto /disk4/kv
    """
    from deepinfer_kvstore import ec_rebuild
    from deepinfer_kvstore.errors import StoreConfigError

    try:
        with progress_bar("rebuilding") as progress:
            done = ec_rebuild.rebuild(root, onto, progress, number=number)
    except StoreConfigError as error:
        raise CommandError(f"kvstore rebuild: {error}") from None
    except OSError as error:
        raise CommandError(f"kvstore rebuild: {error}: do it again once the disk is well") from None
    typer.echo(
        f"{onto} is root number {done.number} (counted from 0): {done.shards} shards in {done.slabs} slabs of"
        f" {done.namespaces} namespaces; {done.unreadable} slots were empty or unreadable"
    )
