"""What a file of results says: shares of right answers, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deepinfer_vllm.evaluation.intervals import clustered
from deepinfer_vllm.evaluation.pass_at_k import pass_at_k, reported
from deepinfer_vllm.evaluation.task import Item

CONFIDENCE = 0.95

Json = dict[str, Any]


def summarised(items: Sequence[Item], records: Mapping[str, Json], samples: int) -> Json:
    """Of scored records by id. An item that failed counts as wrong; one without a record does not count.

    "accuracy" is the mean over items of the share of right samples, "pass@k" that of the unbiased estimates;
    each with its 95 % interval, for all items and by kind.
    """
    there = [records[item.id] for item in items if item.id in records]
    kinds = sorted({record["kind"] for record in there})
    generated = [sample for record in there for sample in record.get("samples", [])]
    return {
        "items": len(items),
        "answered": len(there),
        "samples": samples,
        "confidence": CONFIDENCE,
        **_shares(there, samples),
        "kinds": {kind: _shares([r for r in there if r["kind"] == kind], samples) for kind in kinds},
        "failed": [{"id": record["id"], "reason": record["failed"]} for record in there if "failed" in record],
        "found_by": _counted(sample["how"] or "nothing" for sample in generated),
        "finish_reasons": _counted(sample["finish_reason"] for sample in generated),
        "prompt_tokens": sum(record.get("prompt_tokens", 0) for record in there),
        "generated_tokens": sum(sample["tokens"] for sample in generated),
    }


def _shares(records: Sequence[Json], samples: int) -> Json:
    if not records:
        return {"items": 0}
    right = [sum(record.get("correct", [])) for record in records]
    shares: Json = {"items": len(records), "accuracy": asdict(clustered([c / samples for c in right], samples))}
    if samples > 1:
        shares["pass_at_k"] = {
            str(k): asdict(clustered([pass_at_k(samples, c, k) for c in right], samples)) for k in reported(samples)
        }
    if any("correct_per_byte" in record for record in records):
        both = [record.get("correct_per_byte") or record.get("correct", []) for record in records]
        shares["accuracy_per_byte"] = asdict(clustered([float(any(found)) for found in both], samples))
    return shares


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def lines(name: str, summary: Json) -> list[str]:
    """For a terminal."""
    rows = [("all", summary), *summary["kinds"].items()] if len(summary["kinds"]) != 1 else [("all", summary)]
    told = [
        f"{name}: {summary['answered']} of {summary['items']} items, {summary['generated_tokens']:,} tokens generated"
    ]
    for kind, shares in rows:
        told.append(f"  {kind:<8} {_percent(shares['accuracy'])}  {shares['items']} items")
        told += [f"  {'pass@' + k:>8} {_percent(found)}" for k, found in shares.get("pass_at_k", {}).items()]
        if "accuracy_per_byte" in shares:
            told.append(f"  {'per byte':>8} {_percent(shares['accuracy_per_byte'])}")
    if summary["failed"]:
        first = summary["failed"][0]
        told.append(
            f"  {len(summary['failed'])} failed, and count as wrong; the first, {first['id']}: {first['reason']}"
        )
    return told


def _percent(estimate: Json) -> str:
    return f"{estimate['mean']:7.1%}  [{estimate['low']:.1%}, {estimate['high']:.1%}]"
