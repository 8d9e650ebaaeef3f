"""The router's state as /status says it and the status page shows it: of all workers together."""

from collections.abc import Iterable
from typing import Any

from deepinfer_router.fleet_view import merged_engines
from deepinfer_router.metrics import PREFIX, Snapshot

Row = dict[str, Any]
_OF_WORKERS = ("worker", "pid", "ready", "why_not_ready", "silent_s", "connections", "requests")


def status_view(reports: list[Row], metrics: Snapshot) -> Row:
    """`reports`: of a supervisor's workers. `metrics`: of all of them, added up."""
    reports = sorted(reports, key=lambda report: report["worker"])
    said = [report["status"] for report in reports if "status" in report]
    queues = _queues(said)
    prompts, hits = _by_tenant(metrics, "tenant_prompt_tokens"), _by_tenant(metrics, "tenant_hit_tokens")
    waiting = {queue["tenant"]: queue for queue in queues}
    return {
        "workers": [{name: report.get(name) for name in _OF_WORKERS} for report in reports],
        "engines": merged_engines(report["engines"] for report in reports if "engines" in report),
        "groups": _groups(said),
        "costs": next((status["prefill"]["costs"] for status in said if "costs" in status.get("prefill", {})), None),
        "queues": queues,
        "tenants": [
            {
                "tenant": tenant,
                "waiting": 0,
                "seconds": 0.0,
                **waiting.get(tenant, {}),
                "prompt_tokens": prompts.get(tenant, 0),
                "hit_tokens": hits.get(tenant, 0),
            }
            for tenant in sorted({*prompts, *waiting})
        ],
        "totals": _totals(metrics, sum(prompts.values()), sum(hits.values())),
    }


def _groups(said: Iterable[Row]) -> list[Row]:
    """Each worker has its own cut of engines into groups: the first's is shown, with the demand of all."""
    found: dict[tuple[str, ...], Row] = {}
    for status in said:
        for group in status.get("prefill", {}).get("groups", ()):
            key = (*group["models"], group["group"])
            if key in found:
                found[key]["demand"] += group["demand"]
            else:
                found[key] = dict(group)
    return list(found.values())


def _queues(said: Iterable[Row]) -> list[Row]:
    """Tenants of which something waits."""
    found: dict[str, Row] = {}
    for status in said:
        for tenant, (waiting, seconds) in status.get("queues", {}).items():
            row = found.setdefault(tenant, {"tenant": tenant, "waiting": 0, "seconds": 0.0})
            row["waiting"] += waiting
            row["seconds"] += seconds
    return [row for _, row in sorted(found.items())]


def _totals(metrics: Snapshot, prompt_tokens: float, hit_tokens: float) -> Row:
    """Counters since the start, of which the page makes rates."""
    requests = _children(metrics, "requests")
    first_token = next((family for family in metrics if family["name"] == f"{PREFIX}first_token_seconds"), None)
    buckets = first_token["buckets"] if first_token else []
    counts = [0.0] * (len(buckets) + 1)
    for _, (_, *of_child) in first_token["children"] if first_token else ():
        counts = [sum(pair) for pair in zip(counts, of_child, strict=True)]
    return {
        "requests": sum(value for _, value in requests),
        "failed": sum(value for (_, status), value in requests if status >= "5"),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "first_token": {"buckets": buckets, "counts": counts},
    }


def _by_tenant(metrics: Snapshot, name: str) -> dict[str, float]:
    return {tenant: value for (tenant,), value in _children(metrics, name)}


def _children(metrics: Snapshot, name: str) -> list[Any]:
    return next((family["children"] for family in metrics if family["name"] == PREFIX + name), [])
