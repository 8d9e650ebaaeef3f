"""The checks as text and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from deepinfer_vllm.doctor.check import Check, Status


def worst(checks: Sequence[Check]) -> Status:
    """The gravest status among `checks`; ok for none."""
    statuses = {check.status for check in checks}
    return next((status for status in (Status.FAIL, Status.WARN) if status in statuses), Status.OK)


def as_table(checks: Sequence[Check]) -> str:
    """One line a check, and a line below it for its remedy."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {check.remedy}")
    return "\n".join(lines)


def to_json(checks: Sequence[Check]) -> str:
    """{"status": the gravest, "checks": [{name, status, found, remedy}]}."""
    return json.dumps({"status": worst(checks), "checks": [asdict(check) for check in checks]}, indent=2)
