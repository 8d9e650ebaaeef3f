"""What a policy answers."""

from typing import NamedTuple

from deepinfer_router.target import Target


class Pick(NamedTuple):
    """A target, and why: enough to explain or replay the decision."""

    target: Target
    reason: str
    """A few fixed words: a label of metrics."""
    predicted_seconds: float = 0.0
    """Until the first token, waiting included; of a decode pick 0."""
    group: str = ""
    """Context-length group of a prefill pick."""
    cost_seconds: float = 0.0
    """The request's own part of `predicted_seconds`: what a lease of its prefill books."""
