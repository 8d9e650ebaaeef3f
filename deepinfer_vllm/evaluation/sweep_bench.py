"""One point of a sweep: `vllm bench serve` in a process of its own, and what of its result is kept."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_vllm.evaluation.errors import EvaluationError
from deepinfer_vllm.evaluation.sweep_grid import Point
from deepinfer_vllm.server_process import find_reason, stop_group, vllm_script

KEPT = (
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *(f"p{p}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el") for p in (50, 99)),
)
"""Of a result: seconds, counts, a second, and milliseconds."""

Json = dict[str, Any]


class PointFailed(EvaluationError):
    """A point without a result: the server is gone, or refuses. One line."""


def command(url: str, point: Point, slo: dict[str, float], prompts: int, seed: int, more: Sequence[str]) -> list[str]:
    """What runs. `more`: flags of the user, which come last and win. Raises ServerError without vLLM."""
    goodput = ["--goodput", *(f"{metric}:{limit:g}" for metric, limit in slo.items())] if slo else []
    return [
        *(str(vllm_script()), "bench", "serve", "--base-url", url, "--num-prompts", str(prompts), "--seed", str(seed)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"),
        *(*point.flags(), *goodput, *more),
    ]


def run_point(words: Sequence[str], log: Path) -> Json:
    """Run it; what is `KEPT` of its result. `log` holds what it said, and stays.

    Raises PointFailed where it fails, no request was answered, or its result is none; EvaluationError where `log`
    cannot be written. KeyboardInterrupt ends the process too.
    """
    with tempfile.TemporaryDirectory(prefix="deepinfer-sweep-") as folder:
        kept = ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        try:
            out = log.open("wb")
        except OSError as error:
            raise EvaluationError(f"{log}: {error.strerror}; the same command continues") from None
        with out:
            process = subprocess.Popen(
                [*words, *kept],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ},
            )
        try:
            code = process.wait()
        finally:
            stop_group(process, 5)
        if code:
            reason = find_reason(log.read_text(errors="replace").splitlines())
            raise PointFailed(f"vllm bench serve ended with exit code {code}: {reason}; see {log}")
        try:
            result = json.loads((Path(folder) / "result.json").read_text())
            found = {name: result.get(name) for name in KEPT}
        except (OSError, ValueError, AttributeError) as error:
            raise PointFailed(f"vllm bench serve left no result ({error}); see {log}") from None
    if not found["completed"]:
        raise PointFailed(f"none of {result.get('num_prompts')} requests was answered; see {log}")
    return found
