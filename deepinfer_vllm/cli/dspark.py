"""`deepinfer calibrate-dspark` and `deepinfer dspark-trace`: what DSpark's draft layers learn from an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deepinfer_vllm.cli.errors import CommandError

if TYPE_CHECKING:
    from deepinfer_vllm.spec_decode.calibration import Calibration

Directory = Annotated[Path, typer.Argument(help="A checkpoint with draft layers (mtp.*).", show_default=False)]
PROMPTS = typer.Option(
    "--prompts",
    help='A text a line; or .jsonl with {"prompt": ...}, {"messages": ...} or {"prompt_token_ids": ...} a line.',
    show_default=False,
)
MaxTokens = Annotated[int, typer.Option(min=1, help="Length of an answer.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, help="Of answers. Default: what the checkpoint's generation_config.json says.")
]
Drafts = Annotated[
    int | None, typer.Option(min=1, help="num_speculative_tokens. Default: the checkpoint's dspark_block_size.")
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32, as `vllm serve` takes it.")]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel-size", min=1, help="Ranks of the engine.")]
MaxModelLen = Annotated[int | None, typer.Option(min=2, help="Longest prompt with its answer. Default: the model's.")]


def calibrate(
    directory: Directory,
    prompts: Annotated[Path | None, PROMPTS] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="Instead of prompts: what an engine recorded with DEEPINFER_VLLM_DSPARK_RECORD=FILE."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Default: dspark_calibration.json in the checkpoint.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    drafts: Drafts = None,
    draft_sample_method: Annotated[
        Literal["greedy", "probabilistic"], typer.Option(help="As engines are started with; greedy is vLLM's default.")
    ] = "greedy",
    dtype: Dtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    max_model_len: MaxModelLen = None,
) -> None:
    """Fit the temperatures that make DSpark's confidences true, and write them beside the checkpoint.

    Answers the prompts with drafts that are all verified, or reads what an engine recorded. Engines started on the
    checkpoint from then on use the file, if they draft as this did. Prompts should be like those that are served: a few
    hundred are enough.

    Example: deepinfer calibrate-dspark /models/v41 --prompts prompts.jsonl
    """
    if (prompts is None) == (records is None):
        raise CommandError("calibrate-dspark: give either --prompts FILE or --records FILE")
    with _one_line_errors("calibrate-dspark"):
        from deepinfer_vllm.spec_decode import calibrate as work
        from deepinfer_vllm.spec_decode.offline import EngineChoice

        target = work.target(directory, out)
        if records is not None:
            made, found = work.from_records(directory, records, drafts)
        else:
            assert prompts is not None
            choice = EngineChoice(drafts, dtype, tensor_parallel_size, max_model_len, draft_sample_method)
            made, found = work.from_prompts(directory, prompts, choice, max_tokens, temperature)
        typer.echo(f"Fitting {len(found.drafted):,} {made.draft_sample_method} drafts of {made.positions} tokens.")
        calibration = work.fit_and_write(target, made, found)
    for line in table(calibration):
        typer.echo(line)
    typer.echo(f"Wrote {target}.")


def table(calibration: "Calibration") -> list[str]:
    """A row a position, and what there is to say. ECE: of the chance that all tokens up to it stand, held out."""
    rows = [f"{'position':>8}  {'outcomes':>10}  {'temperature':>11}  {'ECE before':>10}  {'ECE after':>9}"]
    columns = zip(
        calibration.outcomes, calibration.temperatures, calibration.ece_before, calibration.ece_after, strict=True
    )
    for position, (outcomes, temperature, before, after) in enumerate(columns, 1):
        rows.append(f"{position:>8}  {outcomes:>10,}  {temperature:>11.3f}  {before:>10.2%}  {after:>9.2%}")
    return [*rows, *([f"Note: {calibration.note}."] if calibration.note else [])]


def trace(
    directory: Directory,
    prompts: Annotated[Path, PROMPTS],
    out: Annotated[Path, typer.Option(help="A new or empty folder.", show_default=False)],
    max_gb: Annotated[float, typer.Option(min=0.001, help="Texts beyond so many GB (10^9 bytes) are left out.")] = 10.0,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    dtype: Dtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    max_model_len: MaxModelLen = None,
) -> None:
    """Write what a draft model is trained on: the target's states for every token of prompts and its own answers.

    Answers the prompts, then computes each text as a whole. docs/dspark-trace.md describes the files.

    Example: deepinfer dspark-trace /models/v41 --prompts prompts.jsonl --out /data/trace --max-gb 100
    """
    with _one_line_errors("dspark-trace"):
        from deepinfer_vllm.spec_decode import tracing as work
        from deepinfer_vllm.spec_decode.offline import EngineChoice

        choice = EngineChoice(None, dtype, tensor_parallel_size, max_model_len)
        done = work.run(directory, prompts, out, choice, max_tokens, temperature, int(max_gb * 1e9), typer.echo)
    typer.echo(f"{out}: {done.texts:,} texts, {done.tokens:,} tokens, {done.written_bytes / 1e9:.3g} GB.")
    if done.texts < done.wanted:
        raise CommandError(f"dspark-trace: {done.wanted - done.texts} of {done.wanted} texts are not in it: {done.why}")


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    """What the user can act on ends the command with one line; anything else is a bug and shows."""
    from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
    from deepinfer_vllm.offline_engine import EngineError
    from deepinfer_vllm.spec_decode.calibrate import CalibrateError
    from deepinfer_vllm.spec_decode.prompts import PromptsError
    from deepinfer_vllm.spec_decode.trace_files import TraceError

    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CommandError(f"{command}: {where}{error.strerror or error}") from None
    except (CalibrateError, CheckpointError, EngineError, PromptsError, TraceError) as error:
        raise CommandError(f"{command}: {error}") from None
