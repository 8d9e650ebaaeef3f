"""Engines and their load as people and scripts are shown them: of one worker, and of all together."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the supervisor, which adds views up, does without the fleet
    from deepinfer_router.fleet import Fleet
    from deepinfer_router.target import Target

Row = dict[str, Any]
_ADDED = ("active", "kv_tokens", "pending_seconds")


def engines_of(fleet: "Fleet") -> list[Row]:
    """Each engine with its ranks, as this worker sees them; `strangers`: the part that no worker of this host sent."""
    return [
        {
            "id": engine.id,
            "url": engine.url,
            "state": str(engine.state),
            "roles": sorted(engine.roles),
            "models": list(engine.models),
            "ranks": [_rank(target) for target in engine.targets],
        }
        for engine in fleet.engines.values()
    ]


def _rank(target: "Target") -> Row:
    own = target.own  # computed anew each time
    return {
        "rank": target.rank,
        "active": own.active,
        "kv_tokens": own.kv_tokens,
        "pending_seconds": own.pending_seconds,
        "strangers": target.strangers.active,
        "strangers_kv_tokens": target.strangers.kv_tokens,
        "capacity_tokens": target.capacity_tokens,
    }


def merged_engines(views: Iterable[list[Row]]) -> list[Row]:
    """One row an engine. What workers sent is added; each has its own opinion of the state: the commonest counts."""
    by_id: dict[str, list[Row]] = {}
    for view in views:
        for row in view:
            by_id.setdefault(row["id"], []).append(row)
    return [_merged(rows) for _, rows in sorted(by_id.items())]


def _merged(rows: list[Row]) -> Row:
    first = rows[0]
    states = Counter(row["state"] for row in rows)
    alike = [row["ranks"] for row in rows if len(row["ranks"]) == len(first["ranks"])]
    ranks = []
    for parts in zip(*alike, strict=True):
        rank = {**parts[0], **{name: sum(part[name] for part in parts) for name in _ADDED}}
        rank["active"] += rank.pop("strangers")
        rank["kv_tokens"] += rank.pop("strangers_kv_tokens")
        ranks.append(rank)
    totals = {name: sum(rank[name] for rank in ranks) for name in _ADDED}
    return {**first, "state": states.most_common(1)[0][0], "states": dict(states), **totals, "ranks": ranks}
