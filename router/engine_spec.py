"""What discovery tells of an engine."""

from dataclasses import dataclass

from deepinfer_router.roles import Role

BOTH = frozenset((Role.PREFILL, Role.DECODE))


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One endpoint as configuration or discovery describes it. Two that are equal are the same engine, unchanged."""

    url: str
    """scheme://host:port, without a path."""
    id: str = ""
    """Unique and stable; empty: the URL."""
    roles: frozenset[Role] = BOTH
    models: tuple[str, ...] = ()
    """Names that it serves; empty: any."""
    ranks: int = 1
    """Data-parallel ranks behind the URL."""
    capacity_tokens: int | None = None
    """KV tokens a rank has room for; None: learnt from its metrics, no bound until then."""
    engine_class: str = ""
    """Engines of one class have the same costs: hardware, model and parallelism, in the operator's words."""
