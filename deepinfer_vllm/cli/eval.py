"""`deepinfer eval`: how many questions of a task a model answers rightly."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deepinfer_vllm.cli.errors import CommandError

if TYPE_CHECKING:
    from deepinfer_vllm.evaluation.run import Progress

Models = Annotated[list[str], typer.Argument(help="Checkpoint directories, one after the other.", show_default=False)]
KeyValues = list[str] | None


def evaluate(
    models: Models,
    task: Annotated[
        str,
        typer.Option(
            help="JSON Lines of questions and answers, of GSM8K's form too; or builtin:mixed.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of results: TASK.MODEL.jsonl and its summary.")] = Path(
        "eval-results"
    ),
    samples: Annotated[
        int, typer.Option(min=1, max=100_000, help="Replies to each question, each with its own seed.")
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Default: 0 for one sample; for more, what generation_config.json says."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply, its reasoning included.")] = 2048,
    seed: Annotated[int, typer.Option(help="The same seed draws the same seeds of samples.")] = 0,
    thinking: Annotated[
        str, typer.Option(help="auto (the template's default), on, off, or an effort: low, high, xhigh, max, 1 to 100.")
    ] = "auto",
    choices: Annotated[
        Literal["letter", "loglikelihood"],
        typer.Option(help="Of multiple choice: the letter of a reply, or the likeliest option after the question."),
    ] = "letter",
    strict: Annotated[
        bool, typer.Option("--strict", help="Of integers, count only what is boxed or marked as the answer.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    sampling: Annotated[
        KeyValues, typer.Option(metavar="KEY=VALUE", help="One of vLLM's SamplingParams; may be repeated.")
    ] = None,
    engine_arg: Annotated[
        KeyValues,
        typer.Option(metavar="KEY=VALUE", help="One of vLLM's engine arguments, or a JSON object; may be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of continuing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
) -> None:
    """Ask models the questions of a task, and say how many they answer rightly, with 95 % intervals.

    A run that was ended, however, continues with the same command. docs/evaluation.md has the forms of tasks, the rules
    by which answers are found, and the formulas.

    Example: deepinfer eval --task gsm8k.jsonl --samples 4 /models/v41 --engine-arg max_model_len=16384
    """
    from deepinfer_vllm.evaluation import run
    from deepinfer_vllm.evaluation.errors import EvaluationError
    from deepinfer_vllm.evaluation.settings import Settings, engine_names, pairs, sampling_names
    from deepinfer_vllm.evaluation.summary import lines
    from deepinfer_vllm.evaluation.task import read_task
    from deepinfer_vllm.offline_engine import EngineError

    try:
        asked = read_task(task)
        chosen = Settings(
            samples=samples,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            thinking=thinking,
            choices=choices,
            strict=strict,
            system=system,
            sampling=pairs(sampling or [], "--sampling", sampling_names()),
            engine=pairs(engine_arg or [], "--engine-arg", engine_names()),
        )
        paths = [run.results_path(out, asked, model) for model in models]
        if len({*paths}) < len(paths):
            raise EvaluationError(
                "two models of the same name would share a file; evaluate them with another --out each"
            )
        summaries = []
        for model, path in zip(models, paths, strict=True):
            with _bar(path.stem, len(asked.items[:limit])) as show:
                summaries.append(run.evaluate(model, asked, chosen, path, limit=limit, fresh=fresh, progress=show))
    except KeyboardInterrupt:
        typer.echo(
            f"deepinfer: eval: interrupted; what was answered is in {out}, and the same command continues", err=True
        )
        raise typer.Exit(130) from None
    except (EngineError, EvaluationError) as error:
        raise CommandError(f"eval: {error}") from None
    if as_json:
        typer.echo(json.dumps(summaries, indent=1))
    else:
        for path, summary in zip(paths, summaries, strict=True):
            for line in [*lines(path.stem, summary), f"  {path}"]:
                typer.echo(line)
    if all(len(summary["failed"]) == summary["answered"] for summary in summaries):
        raise CommandError(f"eval: every item failed, the first of: {summaries[0]['failed'][0]['reason']}")


@contextmanager
def _bar(label: str, length: int) -> "Iterator[Progress]":
    with typer.progressbar(length=length, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:

        def show(answered: int, right: int) -> None:
            bar.label = f"{label}, {right} right"
            bar.update(answered - bar.pos)

        yield show
