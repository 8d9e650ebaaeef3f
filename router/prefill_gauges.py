"""What the prefill balancer does, as metrics and for the status page."""

from collections.abc import Callable
from typing import Any

from deepinfer_router.metrics import REGISTRY, gauge
from deepinfer_router.prefill import PrefillPolicy

_MOVES = gauge("prefill_moves", "Engines moved between groups since the start.", "models", merge="max")
_FROZEN = gauge("prefill_moves_frozen", "1 while too many engines are ill for any to move.", "models", merge="max")
_ENGINES = gauge("prefill_group_engines", "Engines that get work, by group.", "models", "group", merge="mean")
_DEMAND = gauge("prefill_group_demand", "Seconds of prefill that arrive or wait in a second.", "models", "group")
_TERMS = gauge("prefill_cost", "Coefficients of cost(q, c), seconds.", "kind", "term", merge="mean")
_ERROR = gauge("prefill_cost_error", "Median relative error of the last predictions.", "kind", merge="mean")
_OBSERVED = gauge("prefill_cost_observations", "Prefills that the coefficients were fitted to.", "kind")


def publish(policy: PrefillPolicy) -> Callable[[], None]:
    """Sets the gauges from `policy` before each snapshot. Returns what ends it."""

    def refresh() -> None:
        for (models, grouped), pool in policy.pools.items():
            name = ",".join(models) + ("" if grouped else " whole")
            _MOVES.labels(name).set(pool.moves)
            _FROZEN.labels(name).set(float(pool.frozen))
            for group, engines, demand in zip(policy.groups, pool.counts(), pool.demand, strict=True):
                _ENGINES.labels(name, group).set(engines)
                _DEMAND.labels(name, group).set(demand)
        for kind, fit in policy.costs.fits.items():
            for term in ("alpha", "beta", "gamma", "index"):
                _TERMS.labels(kind, term).set(getattr(fit.cost, term))
            _ERROR.labels(kind).set(fit.error or 0.0)
            _OBSERVED.labels(kind).set(fit.observations)

    REGISTRY.before_snapshot(refresh)
    return lambda: REGISTRY.forget_refresh(refresh)


def status(policy: PrefillPolicy) -> dict[str, Any]:
    """Groups with their engines and demand, and the costs, of plain types."""
    return {
        "groups": [
            {
                "models": list(models),
                "group": name,
                "engines": sorted(engine.id for engine in pool.engines_of(group)),
                "demand": pool.demand[group],
            }
            for (models, _), pool in policy.pools.items()
            for group, name in enumerate(policy.groups)
        ],
        "costs": policy.costs.table().to_json(),
    }
