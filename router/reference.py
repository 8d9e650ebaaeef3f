"""Tables of every metric and every setting, for docs/router-reference.md: `python -m deepinfer_router.reference`."""

import json
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import deepinfer_router
from deepinfer_router.autoscale_config import AutoscaleConfig
from deepinfer_router.boot import Boot
from deepinfer_router.config import RouterConfig
from deepinfer_router.config_errors import section
from deepinfer_router.metrics import REGISTRY
from deepinfer_router.poller import Poller
from deepinfer_router.supervisor import Supervisor


def metrics() -> list[dict[str, Any]]:
    """Every family of workers and supervisor, by name: name, kind, help, labels, buckets, merge."""
    for module in pkgutil.iter_modules(deepinfer_router.__path__, "deepinfer_router."):
        import_module(module.name)
    poller = Poller()
    autoscale = AutoscaleConfig.model_validate({}).model_dump()
    supervisor = Supervisor(Boot(b"", {"path": ""}, ("", 0), [], autoscale=autoscale), poller)
    poller.close()
    return sorted([*REGISTRY.describe(), *supervisor.registry.describe()], key=lambda family: str(family["name"]))


def settings(model: type[BaseModel] = RouterConfig, under: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting by its dotted name; below a list or table its entries' as `name[].setting`."""
    for name, field in model.model_fields.items():
        below = section(field.annotation)
        if below is None:
            yield under + name, field
        else:
            many = "[]" if below not in (field.annotation, *get_args(field.annotation)) or _is_list(field) else ""
            yield from settings(below, f"{under}{name}{many}.")


def metrics_table() -> str:
    """Markdown."""
    rows = ["| Metric | Kind | Labels | What it is |", "| --- | --- | --- | --- |"]
    for family in metrics():
        name = family["name"] + ("_total" if family["kind"] == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in family["labels"])
        buckets = f" Buckets: {', '.join(f'{bound:g}' for bound in family['buckets'])}." if family["buckets"] else ""
        workers = "" if family["merge"] == "sum" else f" Of several workers: {family['merge']}."
        rows.append(f"| `{name}` | {family['kind']} | {labels} | {family['help']}{workers}{buckets} |")
    return "\n".join(rows)


def settings_table() -> str:
    """Markdown."""
    rows = ["| Setting | Default | What it is |", "| --- | --- | --- |"]
    for name, field in settings():
        default = "" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
        said = " ".join(str(field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {default} | {said} |")
    return "\n".join(rows)


def _is_list(field: FieldInfo) -> bool:
    return getattr(field.annotation, "__origin__", None) in (tuple, list, dict)


def _plain(value: Any) -> str:
    return json.dumps(
        value,
        ensure_ascii=False,
        default=lambda other: list(other) if isinstance(other, set | frozenset) else str(other),
    )


def page() -> str:
    """The whole page."""
    return f"""# Router: every setting and metric

This page is `python -m deepinfer_router.reference`; a test keeps the two equal. Names of settings are the sections of
`router.yaml` from outside to inside; `[]` stands for each entry of a list or table.

## Settings

{settings_table()}

## Metrics

Counters and histograms of all workers are added, those of workers that died included; gauges too, unless said
otherwise.

{metrics_table()}
"""


if __name__ == "__main__":
    print(page(), end="")
