"""Ways in which the mock engine fails on demand. Each is a report of a real fleet."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Kind = Literal[
    "refuse",
    "reset_before",
    "reset_mid",
    "fin_mid",
    "stall_before",
    "stall_mid",
    "status",
    "slow_head",
    "close_each",
    "malformed_chunk",
    "gzip",
    "huge_headers",
    "split",
    "unhealthy",
]
KINDS = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail, of every answer to inference (`unhealthy`: of /health) until lifted or used up."""

    kind: Kind
    times: int | None = None
    """Requests that it still strikes; None: all."""
    status: int = 503
    """Of kind `status`."""
    retry_after_s: int | None = None
    """Sent with `status`."""
    seconds: float = 0.0
    """Delay of `slow_head`; of `refuse` how long (0: until lifted)."""
    after_events: int = 1
    """`*_mid`, `malformed_chunk`: events that still come through."""
    size: int = 1
    """`split`: bytes a write; `huge_headers`: bytes of one header."""

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown kind or a number below its least."""
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.kind!r} is unknown: there are {', '.join(KINDS)}")
        if self.size < 1 or self.seconds < 0 or self.after_events < 0:
            raise ValueError(f"fault {self.kind}: size >= 1, seconds >= 0 and after_events >= 0 are needed")


class Faults:
    """Those in force; one of each kind."""

    def __init__(self) -> None:
        self._active: dict[str, Fault] = {}

    def set(self, kind: Kind, **how: Any) -> Fault:
        """From now on. Raises ValueError, TypeError for what no fault has."""
        fault = self._active[kind] = Fault(kind, **how)
        return fault

    def clear(self, *kinds: str) -> None:
        """Lift these, or all."""
        for kind in kinds or tuple(self._active):
            self._active.pop(kind, None)

    def __contains__(self, kind: str) -> bool:
        return kind in self._active

    def strike(self) -> dict[str, Fault]:
        """What is to happen to one request; counts it."""
        if not self._active:
            return {}
        struck = dict(self._active)
        for kind, fault in struck.items():
            if fault.times is not None:
                if fault.times <= 1:
                    del self._active[kind]
                else:
                    self._active[kind] = replace(fault, times=fault.times - 1)
        return struck
