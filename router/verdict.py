"""What the status of an engine's answer says about the engine."""

from enum import StrEnum


class Verdict(StrEnum):
    """What to do with an answer."""

    SERVED = "served"
    REJECTED = "rejected"
    """The request's fault: it is passed on, and the engine is as good as before."""
    PRESSURE = "pressure"
    """The engine is full: another may not be."""
    FAULT = "fault"


def verdict(status: int) -> Verdict:
    """Of the answer's status. vLLM says 503 where its queue is full, and 400 to prompts that are too long."""
    if status < 400:
        return Verdict.SERVED
    if status in (429, 503):
        return Verdict.PRESSURE
    return Verdict.REJECTED if status < 500 else Verdict.FAULT
