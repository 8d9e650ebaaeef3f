"""`deepinfer demo`: a tiny DeepSeek-V4.1 served by vLLM on this machine, and a few answers from it."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[Path, typer.Option(help="For the checkpoint, the store and the logs.")] = Path(".demo"),
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.", min=0)] = 120,
) -> None:
    """Write a tiny checkpoint, serve it, ask it about text and images, for a tool call and JSON, and say what ran.

    Then start two servers on its store, with the router before them, and ask a long question again. Last, serve a
    trained pair with DSpark and say how many tokens a step gives.

    Example: deepinfer demo --directory /tmp/v41-demo --timeout 300
    """
    from deepinfer_vllm.demo import main

    raise typer.Exit(main(directory, timeout))
