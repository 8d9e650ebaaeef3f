"""The error a command raises for something the user can act on."""

import typer


class CommandError(typer.TyperException):
    """Ends the command with exit code 1 and its message as one line on stderr, without a traceback."""

    exit_code = 1
