"""A model's answers to a task, into a file of results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from deepinfer_vllm.evaluation.answers import answered
from deepinfer_vllm.evaluation.errors import EvaluationError
from deepinfer_vllm.evaluation.json_file import write_json
from deepinfer_vllm.evaluation.questions import Asker, Question
from deepinfer_vllm.evaluation.records import failed, record, scored
from deepinfer_vllm.evaluation.results_file import ResultsFile
from deepinfer_vllm.evaluation.settings import Settings
from deepinfer_vllm.evaluation.summary import summarised
from deepinfer_vllm.evaluation.task import Item, Task
from deepinfer_vllm.offline_engine import offline_engine

Json = dict[str, Any]
Progress = Callable[[int, int], None]
"""Told of items that are done, and of how many of them have a right sample."""


def results_path(out: Path, task: Task, model: str) -> Path:
    """Where the answers of a model are kept: OUT/TASK.MODEL.jsonl."""
    name = re.sub(r"[^\w.-]+", "-", Path(model).resolve().name)
    return out / f"{task.name}.{name}.jsonl"


def evaluate(
    model: str, task: Task, settings: Settings, path: Path, *, limit: int | None, fresh: bool, progress: Progress
) -> Json:
    """Ask what the file at `path` lacks, of the first `limit` items, and write and return the summary beside it.

    An engine is started only if something is lacking. Raises EvaluationError and EngineError; what was answered until
    then is in the file, also on KeyboardInterrupt.
    """
    items = task.items[:limit]
    try:
        recorded = settings.recorded(task, model)
    except OSError as error:
        raise EvaluationError(f"{model}: {error.strerror}") from None
    with ResultsFile(path, recorded, fresh) as results:
        known = {
            item.id: _scored_again(item, results.records[item.id], settings.strict, path)
            for item in items
            if item.id in results.records
        }
        open_items = [item for item in items if item.id not in known]
        if open_items:
            _ask(model, open_items, settings, results, known, progress)
    summary = {
        "task": task.name,
        "model": model,
        **summarised(items, known, settings.samples),
        "settings": recorded,
        "strict": settings.strict,
    }
    write_json(path.with_suffix(".summary.json"), summary)
    return summary


def _scored_again(item: Item, found: Json, strict: bool, path: Path) -> Json:
    """`scored` of what a file holds, which somebody may have edited. Raises EvaluationError."""
    try:
        return scored(item, found, strict)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EvaluationError(
            f"{path}: what it holds of item {item.id!r} is damaged: remove that line, or begin anew with --fresh"
        ) from error


def _ask(
    model: str,
    items: Sequence[Item],
    settings: Settings,
    results: ResultsFile,
    known: dict[str, Json],
    progress: Progress,
) -> None:
    """Answer `items`, into `results` and, scored, into `known`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    by_id = {item.id: item for item in items}
    questions: dict[str, Sequence[Question]] = {}

    right = sum(any(found.get("correct", [])) for found in known.values())

    def keep(found: Json) -> None:
        nonlocal right
        item = by_id[found["id"]]
        known[item.id] = scored(item, found, settings.strict)
        results.append(known[item.id])
        right += any(known[item.id].get("correct", []))
        progress(len(known), right)

    with offline_engine(model, {}, **engine_arguments(model, settings)) as llm:
        asker = Asker(llm.get_tokenizer(), settings, llm.model_config.get_diff_sampling_param())

        def asked() -> Iterator[tuple[str, Sequence[Question]]]:
            for item in items:
                try:
                    questions[item.id] = asker.questions(item)
                except EvaluationError as error:
                    keep(failed(item, str(error)))
                else:
                    yield item.id, questions[item.id]

        in_flight = 2 * llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        try:
            with closing(answered(llm.llm_engine, asked(), in_flight)) as stream:
                for name, outputs in stream:
                    item, of = by_id[name], questions.pop(name)
                    keep(failed(item, outputs) if isinstance(outputs, str) else record(item, of, outputs))
        except EngineDeadError as error:
            raise EvaluationError(f"{model}: the engine died; {len(known)} items are kept: {error}") from error


def engine_arguments(model: str, settings: Settings) -> Json:
    """The user's, and V4.1's own tokenizer for a V4.1 directory."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        config = {}
    ours = isinstance(config, dict) and config.get("model_type") == "deepseek_v41"
    return {**({"tokenizer_mode": "deepseek_v41"} if ours else {}), **settings.engine}
