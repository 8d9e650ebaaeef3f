"""The tolerances of a golden directory, as `golden.json` states them.

The limits of the format (`FORMAT_LIMITS`) decide where they are wider than the file's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Limits:
    """None or False: not checked. rel is the rms of a difference over the standard deviation of the golden rows."""

    max_abs: float | None = None
    rel_rms: float | None = None  # for prompts of up to `short_tokens`
    rel_rms_longer: float | None = None
    short_tokens: int = 64
    hidden_rel: float | None = None  # per layer, norm of the difference over the norm
    argmax_margin: float | None = None  # argmax must be equal where the golden margin is at least this
    argmax_agreement: float | None = None  # least share of equal argmax, for prompts of `argmax_from_tokens` on
    argmax_from_tokens: int = 0
    greedy_exact: bool = False
    index_topk_rows: float | None = None  # largest share of differing rows
    router_rows: float | None = None
    unknown: tuple[str, ...] = ()  # limits of the file that nothing here checks

    def rel_rms_for(self, tokens: int) -> float | None:
        """The rel limit for a prompt of that many tokens."""
        return self.rel_rms_longer if tokens > self.short_tokens else self.rel_rms


FORMAT_LIMITS = {
    "plain": Limits(max_abs=2e-4),
    "qat": Limits(rel_rms=1e-2, rel_rms_longer=3e-2, argmax_agreement=0.97, argmax_from_tokens=64),
    "bf16": Limits(rel_rms=0.12, rel_rms_longer=0.12, argmax_agreement=0.88, argmax_from_tokens=64),
}


def parse_limits(kind: str, tolerance: dict[str, Any]) -> Limits:
    """Read the `tolerance` object of one value file; `kind` is plain, qat or bf16."""
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in tolerance.items():
        parsed = _parse(key, value)
        values.update(parsed)
        if not parsed:
            unknown.append(key)
    return _widen(Limits(**values, unknown=tuple(unknown)), FORMAT_LIMITS[kind])


def _parse(key: str, value: Any) -> dict[str, Any]:
    """One key of the file, which may carry a token count, as fields of `Limits`; empty when unknown."""
    if match := re.fullmatch(r"rel_rms_up_to_(\d+)_tokens", key):
        return {"rel_rms": value, "short_tokens": int(match[1])}
    if match := re.fullmatch(r"argmax_agreement_min_from_(\d+)_tokens", key):
        return {"argmax_agreement": value, "argmax_from_tokens": int(match[1])}
    if key.startswith("rel_rms_against_"):
        return {"rel_rms": value, "rel_rms_longer": value}
    fields = {
        "max_abs": "max_abs",
        "rel_rms_longer": "rel_rms_longer",
        "hidden_rel": "hidden_rel",
        "argmax_exact_where_margin_at_least": "argmax_margin",
        "greedy_exact": "greedy_exact",
        "index_topk_rows_differing_max": "index_topk_rows",
        "router_rows_differing_max": "router_rows",
    }
    return {fields[key]: value} if key in fields else {}


def _widen(own: Limits, common: Limits) -> Limits:
    """Where both state a limit, take the wider."""

    def wider(mine: float | None, other: float | None) -> float | None:
        return mine if mine is None or other is None else max(mine, other)

    agreement = own.argmax_agreement
    if agreement is not None and common.argmax_agreement is not None:
        agreement = min(agreement, common.argmax_agreement)
    return replace(
        own,
        max_abs=wider(own.max_abs, common.max_abs),
        rel_rms=wider(own.rel_rms, common.rel_rms),
        rel_rms_longer=wider(own.rel_rms_longer, common.rel_rms_longer),
        argmax_agreement=agreement,
    )
