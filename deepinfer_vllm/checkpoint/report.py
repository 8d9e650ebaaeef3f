"""Print comparisons as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from deepinfer_vllm.checkpoint.compare import Row

PIPE_WIDTH = 120  # columns where no terminal tells


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def print_rows(console: Console, title: str, rows: Sequence[Row], all_rows: bool) -> None:
    """The table and a line that sums it up. Without `all_rows`: what is outside, and the worst of each kind."""
    table = Table(title=title, title_justify="left")
    table.add_column("prompt")
    table.add_column("comparison")
    table.add_column("measured", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("")
    for row in rows if all_rows else worst_of_each(rows):
        sign = "≥" if row.at_least else "≤"
        verdict = "ok" if row.ok else "[bold red]OUTSIDE[/]"
        table.add_row(row.where, row.what, f"{row.measured:.3g}", f"{sign} {row.limit:.3g}", verdict)
    console.print(table)
    outside = sum(not row.ok for row in rows)
    console.print(f"{title}: {len(rows)} comparisons, {outside} outside their limits", highlight=False)


def worst_of_each(rows: Sequence[Row]) -> list[Row]:
    """Of each prompt and kind (the words before the first comma) the worst row, and every row that is outside."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        kind = (row.where, row.what.partition(",")[0])
        if kind not in worst or row.strain > worst[kind].strain:
            worst[kind] = row
    return [row for row in rows if not row.ok or row in worst.values()]
