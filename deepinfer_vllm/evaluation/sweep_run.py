"""A sweep: the points that a folder lacks, one after the other, and the results of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from deepinfer_vllm.evaluation.json_file import write_json
from deepinfer_vllm.evaluation.results_file import ResultsFile
from deepinfer_vllm.evaluation.sweep_bench import PointFailed, command, run_point
from deepinfer_vllm.evaluation.sweep_grid import Point
from deepinfer_vllm.hidden_secrets import hidden_line, hidden_words
from deepinfer_vllm.record_facts import record_facts

Json = dict[str, Any]
Progress = Callable[[int, str], None]
"""Told of points that are done, and of what comes next."""


def sweep(
    start: Callable[[], AbstractContextManager[str]],
    server: str,
    points: Sequence[Point],
    slo: dict[str, float],
    *,
    prompts: int,
    seed: int,
    more: Sequence[str],
    out: Path,
    fresh: bool,
    called: Sequence[str],
    progress: Progress,
) -> Json:
    """Measure what OUT/points.jsonl lacks; write and return OUT/sweep.json: how it was taken, settings, and a result a
    point. Secrets are in neither file.

    `start`: the server's address, for as long as it is needed; not called where nothing lacks. `server`: what is
    measured, as a later run must name it again. `called`: the command line of this one. A point that fails is in the
    result with its reason and is tried again by the next run. Raises EvaluationError; points measured until then are
    kept.
    """
    given = {"server": hidden_line(server), "bench_arguments": hidden_words(more)}
    settings = {"slo_ms": slo, "prompts": prompts, "seed": seed, **given}
    failed: dict[str, str] = {}
    with ResultsFile(out / "points.jsonl", settings, fresh) as results:
        lacking = [point for point in points if point.name not in results.records]
        progress(len(points) - len(lacking), "the server starts")
        with start() if lacking else nullcontext("") as url:
            for number, point in enumerate(lacking, len(points) - len(lacking)):
                progress(number, point.name)
                words = command(url, point, slo, prompts, seed, more)
                try:
                    results.append({"id": point.name, **run_point(words, out / f"{point.name}.log")})
                except PointFailed as error:
                    failed[point.name] = str(error)
        progress(len(points), "")
        measured = [{**_described(point), **_result(point, results.records, failed)} for point in points]
    whole = {**record_facts(called), "settings": settings, "points": measured}
    write_json(out / "sweep.json", whole)
    return whole


def _described(point: Point) -> Json:
    """JSON has no infinity: a rate of null is one without bound."""
    rate = None if point.rate == float("inf") else point.rate
    lengths = {"input_tokens": point.input_tokens, "output_tokens": point.output_tokens}
    return {"name": point.name, "curve": point.curve, "rate": rate, "concurrency": point.concurrency, **lengths}


def _result(point: Point, records: dict[str, Json], failed: dict[str, str]) -> Json:
    if point.name in failed:
        return {"error": failed[point.name]}
    return {name: value for name, value in records[point.name].items() if name != "id"}
