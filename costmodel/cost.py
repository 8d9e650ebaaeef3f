"""cost(q, c): seconds of prefill of q new tokens behind c tokens already in the cache."""

from dataclasses import asdict, dataclass, fields
from math import isfinite, sqrt
from typing import Any

SCHEMA = "deepinfer.cost/1"
MAX_TOKENS = 1 << 24
"""More than any context: `largest_q` answers no more."""

# Far beyond any engine; what is beyond them is a slip of units, such as milliseconds.
_LIMITS = {"alpha": 3600.0, "beta": 10.0, "gamma": 0.1, "index": 0.1}


class CostError(ValueError):
    """Coefficients that no engine can have, or a file of them that cannot be read."""


@dataclass(frozen=True, slots=True)
class Cost:
    """alpha + beta * q + gamma * attended + index * scanned, in seconds; immutable.

    The token at position x attends to x earlier ones, so q tokens behind c of them attend to q * (c + q/2), and
    cost(q, c) = alpha + beta*q + gamma*q*(c + q/2): a quadratic in q, as DeepSeek says to fit for its prefill chunks. A
    model with an index selects at most `cap_tokens` of the earlier ones: each token then attends to min(x, cap_tokens),
    and its index scans all x.

    Chunks add up: seconds(a + b, c) == seconds(a, c) + seconds(b, c + a) - alpha.
    """

    alpha: float
    """Seconds of a prefill whatever its size."""
    beta: float
    """Seconds a new token: experts and projections."""
    gamma: float
    """Seconds a pair of a new token and one that it attends to."""
    cap_tokens: int | None = None
    """How many tokens the index selects; None: no index, all are attended to."""
    index: float = 0.0
    """Seconds a pair of a new token and one that its index scans."""

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not isfinite(value) or not 0 <= value <= limit:
                raise CostError(f"{name} = {value!r} is not in 0..{limit:g} seconds; give seconds, not milliseconds")
        if self.cap_tokens is None:
            if self.index:
                raise CostError(f"index = {self.index!r} without cap_tokens; a model without an index has index 0")
        elif not 1 <= self.cap_tokens <= MAX_TOKENS:
            raise CostError(f"cap_tokens = {self.cap_tokens!r} is not in 1..{MAX_TOKENS}")

    def seconds(self, q: float, c: float) -> float:
        """Seconds of q >= 0 new tokens behind c >= 0 cached ones."""
        pairs = q * (c + 0.5 * q)
        if self.cap_tokens is None:
            return self.alpha + self.beta * q + self.gamma * pairs
        return self.alpha + self.beta * q + self.gamma * attended(q, c, self.cap_tokens) + self.index * pairs

    def largest_q(self, c: float, budget_s: float, most: int = MAX_TOKENS) -> int:
        """Largest q of 0..`most` whose seconds are within `budget_s`; 0 if not even one token's are. Closed form."""
        if not self.seconds(1, c) <= budget_s:
            return 0
        if self.seconds(most, c) <= budget_s:
            return most
        room, start = budget_s - self.alpha, 0.0
        linear, curve = self.beta, self.gamma
        if self.cap_tokens is not None:
            curve += self.index
            below = max(0.0, self.cap_tokens - c)  # so many tokens attend to all before them
            below_s = self.seconds(below, c) - self.alpha
            if below_s <= room:
                room, start, c = room - below_s, below, c + below
                linear, curve = linear + self.gamma * self.cap_tokens, self.index
        linear += curve * c
        root = linear + sqrt(linear * linear + 2.0 * curve * max(0.0, room))
        q = min(most, int(start + 2.0 * room / root)) if root else most
        if self.seconds(q, c_all := c - start) > budget_s:  # rounding: at most a token
            return q - 1
        return q + 1 if q < most and self.seconds(q + 1, c_all) <= budget_s else q

    def to_json(self) -> dict[str, Any]:
        """{"schema", "unit", and the coefficients}; `from_json` reads it."""
        return {"schema": SCHEMA, "unit": "seconds"} | asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "Cost":
        """Reads what `to_json` gave. Raises CostError for anything else: another schema or unit, other fields."""
        names = [field.name for field in fields(cls)]
        if not isinstance(value, dict) or value.keys() != {"schema", "unit", *names}:
            raise CostError(f"coefficients need exactly schema, unit, {', '.join(names)}; there is {_keys(value)}")
        if value["schema"] != SCHEMA or value["unit"] != "seconds":
            raise CostError(f"schema {value['schema']!r} in {value['unit']!r}; this reads {SCHEMA!r} in 'seconds'")
        cap, numbers = value["cap_tokens"], {name: value[name] for name in _LIMITS}
        for name, number in numbers.items():
            if type(number) not in (int, float):
                raise CostError(f"{name} = {number!r} is not a number")
        if cap is not None and type(cap) is not int:
            raise CostError(f"cap_tokens = {cap!r} is neither a whole number nor null")
        return cls(cap_tokens=cap, **numbers)


def clipped(alpha: float, beta: float, gamma: float, cap_tokens: int | None = None, index: float = 0.0) -> Cost:
    """The nearest coefficients that an engine can have."""
    values = dict(zip(_LIMITS, (alpha, beta, gamma, index), strict=True))
    return Cost(cap_tokens=cap_tokens, **{name: min(max(0.0, value), _LIMITS[name]) for name, value in values.items()})


def attended(q: float, c: float, cap_tokens: int) -> float:
    """Pairs of q new tokens behind c and what each attends to: the integral of min(x, cap_tokens) over c..c+q."""
    below = min(q, max(0.0, cap_tokens - c))
    return below * (c + 0.5 * below) + (q - below) * cap_tokens


def _keys(value: Any) -> str:
    return ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__
