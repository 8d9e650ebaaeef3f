"""Adds up the metrics of several workers and writes them as Prometheus' text format (version 0.0.4)."""

from collections.abc import Iterable, Iterator
from typing import Any

from deepinfer_router.metrics import Snapshot

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})

State = float | list[float]


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One snapshot of several: counters and histograms added, gauges as their family says.

    A family or child that only some have is taken as it is; of a histogram that changed its buckets, the first's stay.
    """
    families: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[tuple[str, ...], list[State]]] = {}
    for snapshot in snapshots:
        for family in snapshot:
            first = families.setdefault(family["name"], family)
            if first["buckets"] != family["buckets"]:
                continue
            children = found.setdefault(family["name"], {})
            for values, state in family["children"]:
                children.setdefault(tuple(values), []).append(state)
    return [
        {
            **family,
            "children": [[list(values), _together(family["merge"], states)] for values, states in found[name].items()],
        }
        for name, family in sorted(families.items())
    ]


def only_growing(snapshot: Snapshot) -> Snapshot:
    """Without gauges: what remains true of a worker that has died."""
    return [family for family in snapshot if family["kind"] != "gauge"]


def expose(snapshot: Snapshot) -> bytes:
    """The text that Prometheus reads."""
    return "".join(line for family in snapshot for line in _family(family)).encode()


def _together(how: str, states: list[State]) -> State:
    if isinstance(states[0], list):
        return [sum(column) for column in zip(*states, strict=True)]
    values = [state for state in states if not isinstance(state, list)]
    if how == "mean":
        return sum(values) / len(values)
    return {"max": max, "min": min}.get(how, sum)(values)


def _family(family: dict[str, Any]) -> Iterator[str]:
    kind = family["kind"]
    name = family["name"] + ("_total" if kind == "counter" else "")
    yield f"# HELP {name} {family['help'].translate(_HELP_ESCAPES)}\n# TYPE {name} {kind}\n"
    for values, state in family["children"]:
        named = zip(family["labels"], values, strict=True)
        pairs = [f'{label}="{value.translate(_ESCAPES)}"' for label, value in named]
        if kind == "histogram":
            yield from _histogram(name, pairs, family["buckets"], state)
        else:
            yield f"{name}{_braces(pairs)} {state!r}\n"


def _histogram(name: str, pairs: list[str], buckets: list[float], state: list[float]) -> Iterator[str]:
    total, *counts = state
    running = 0.0
    for bound, count in zip([*map(str, map(float, buckets)), "+Inf"], counts, strict=True):
        running += count
        end = f'le="{bound}"'
        yield f"{name}_bucket{_braces([*pairs, end])} {running:.0f}\n"
    yield f"{name}_sum{_braces(pairs)} {total!r}\n{name}_count{_braces(pairs)} {running:.0f}\n"


def _braces(pairs: list[str]) -> str:
    return "{" + ",".join(pairs) + "}" if pairs else ""
