"""One row of the doctor's table."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it stands, what was found, and (unless ok) what to do about it."""

    name: str
    status: Status
    found: str
    remedy: str = ""
