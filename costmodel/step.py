"""What a whole step of an engine takes: prefill chunks of several requests, and the decodes that run with them."""

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any, NamedTuple

from deepinfer_costmodel.cost import Cost, CostError, attended

SCHEMA = "deepinfer.step-cost/1"
MOST_SECONDS = {"step": 3600.0, "decode": 10.0, "context": 0.1, "embed": 10.0}
"""Far beyond any engine; what is beyond them is a slip of units, such as milliseconds."""


class Load(NamedTuple):
    """What there is to compute in a step; `chunk` adds prefill to it."""

    chunks: int = 0
    """Requests that prefill."""
    tokens: int = 0
    """New tokens of these."""
    pairs: float = 0.0
    """Of each new token and one before it."""
    attended: float = 0.0
    """Of these pairs, those that a model with an index attends to; without one 0."""
    decodes: int = 0
    """Tokens of the requests that decode, drafts with them."""
    context: int = 0
    """Tokens in the cache of the requests that decode."""
    embeds: int = 0
    """Embeddings of images, that an encoder computes in the step."""

    def chunk(self, q: int, c: int, cap_tokens: int | None) -> "Load":
        """With q new tokens behind c cached ones of one more request."""
        seen = 0.0 if cap_tokens is None else attended(q, c, cap_tokens)
        return self._replace(
            chunks=self.chunks + 1,
            tokens=self.tokens + q,
            pairs=self.pairs + q * (c + 0.5 * q),
            attended=self.attended + seen,
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """Linear in a `Load`; immutable. Of one prefill alone it is `prefill.seconds(q, c)`.

    step + (prefill.alpha - step) * chunks + beta * tokens + gamma * (pairs or attended) + index * pairs
    + decode * decodes + context * context + embed * embeds, in seconds.
    """

    prefill: Cost
    """cost(q, c) of a step with one prefill and nothing else."""
    step: float
    """Seconds of any step, at most `prefill.alpha`: the rest of that is what each prefill in it takes by itself."""
    decode: float
    """Seconds a token of decodes."""
    context: float
    """Seconds a cached token of requests that decode."""
    embed: float
    """Seconds an embedding of an image."""

    def __post_init__(self) -> None:
        for name, limit in MOST_SECONDS.items():
            value = getattr(self, name)
            if not isfinite(value) or not 0 <= value <= limit:
                raise CostError(f"{name} = {value!r} is not in 0..{limit:g} seconds; give seconds, not milliseconds")
        if self.step > self.prefill.alpha:
            raise CostError(
                f"step = {self.step!r} is more than alpha = {self.prefill.alpha!r} of a step with a prefill"
            )

    @classmethod
    def of(cls, prefill: Cost) -> "StepCost":
        """Of an engine of which prefills alone are known: a token of a decode costs what one of a prefill does."""
        pair = prefill.index if prefill.cap_tokens is not None else prefill.gamma
        return cls(prefill, prefill.alpha, prefill.beta, pair, prefill.beta)

    def seconds(self, load: Load) -> float:
        """Seconds of a step."""
        prefill, chunks = self.prefill, load.chunks
        total = self.step + (prefill.alpha - self.step) * chunks + prefill.beta * load.tokens
        if prefill.cap_tokens is None:
            total += prefill.gamma * load.pairs
        else:
            total += prefill.gamma * load.attended + prefill.index * load.pairs
        return total + self.decode * load.decodes + self.context * load.context + self.embed * load.embeds

    def to_json(self) -> dict[str, Any]:
        """{"schema", "unit", "prefill": what `Cost.to_json` gives, and the other coefficients}."""
        return {"schema": SCHEMA, "unit": "seconds"} | asdict(self) | {"prefill": self.prefill.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> "StepCost":
        """Reads what `to_json` gave. Raises CostError for anything else."""
        names = [field.name for field in fields(cls)]
        if not isinstance(value, dict) or value.keys() != {"schema", "unit", *names}:
            raise CostError(f"a step's coefficients need exactly schema, unit, {', '.join(names)}")
        if value["schema"] != SCHEMA or value["unit"] != "seconds":
            raise CostError(f"schema {value['schema']!r} in {value['unit']!r}; this reads {SCHEMA!r} in 'seconds'")
        for name in MOST_SECONDS:
            if type(value[name]) not in (int, float):
                raise CostError(f"{name} = {value[name]!r} is not a number")
        return cls(Cost.from_json(value["prefill"]), **{name: value[name] for name in MOST_SECONDS})
