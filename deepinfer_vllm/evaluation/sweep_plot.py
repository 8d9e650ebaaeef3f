"""A sweep as a picture: throughput against latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_vllm.evaluation.errors import EvaluationError

Json = dict[str, Any]


def need_matplotlib() -> None:
    """Raises EvaluationError without it: before a sweep that takes hours, rather than after."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        remedy = 'pip install "deepinfer-vllm[plot]", or go without by --no-plot'
        raise EvaluationError(f"the picture needs matplotlib: {remedy}") from None


def plot(whole: Json, path: Path) -> None:
    """Draw the points of a sweep.json, a curve for each pair of lengths: latencies and goodput over throughput.

    TTFT and inter-token latency at p50 (solid) and p99 (dashed), on logarithmic axes; goodput beside all requests.
    Raises EvaluationError where no point has a result, or the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [point for point in whole["points"] if "error" not in point]
    if not points:
        raise EvaluationError("no point has a result: nothing to draw")
    slo = whole["settings"]["slo_ms"]
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    first, token, good = figure.subplots(1, 3)
    for number, curve in enumerate(dict.fromkeys(point["curve"] for point in points)):
        ours = [point for point in points if point["curve"] == curve]
        for axes, metric in ((first, "ttft"), (token, "itl")):
            for percentile, style in ((50, "-"), (99, "--")):
                values = [point[f"p{percentile}_{metric}_ms"] for point in ours]
                label = f"{curve}, p{percentile}"
                axes.plot(_column(ours, "output_throughput"), values, f"C{number}o{style}", markersize=4, label=label)
        good.plot(range(len(ours)), _column(ours, "request_throughput"), f"C{number}o-", markersize=4, label=curve)
        if slo:
            told = f"{curve}, within the SLO"
            good.plot(range(len(ours)), _column(ours, "request_goodput"), f"C{number}s--", markersize=4, label=told)
    for axes, title, metric in ((first, "Time to first token", "ttft"), (token, "Inter-token latency", "itl")):
        axes.set(title=title, xlabel="output tokens/s", ylabel="ms", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        limit = slo.get("tpot" if metric == "itl" else metric)
        if limit is not None:
            axes.axhline(limit, color="grey", linewidth=0.8, linestyle=":", label=f"SLO, {limit:g} ms")
    _load_axis(good, points)
    told = ", ".join(f"{metric} {limit:g} ms" for metric, limit in slo.items())
    good.set(title=f"Goodput ({told})" if slo else "Throughput", ylabel="requests/s", ylim=(0, None))
    for axes in (first, token, good):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120, metadata={"Software": None})
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _column(points: Sequence[Json], name: str) -> list[float]:
    return [point[name] for point in points]


def _load_axis(axes: Any, points: Sequence[Json]) -> None:
    """Loads in the order of the sweep; each curve has the same."""
    loads = list(dict.fromkeys((point["rate"], point["concurrency"]) for point in points))
    labels = [
        " ".join([*([] if rate is None else [f"{rate:g}/s"]), *([f"≤{limit}"] if limit else [])]) or "all"
        for rate, limit in loads
    ]
    axes.set_xticks(range(len(loads)), labels, rotation=20 if len(loads) > 4 else 0)
    axes.set_xlabel("load: requests/s, ≤ at a time")
