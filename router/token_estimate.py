"""How many tokens a prompt has, where nobody has counted: its bytes times what its model has made of bytes lately."""

WEIGHT = 0.05
"""Of a new observation in the mean of its model."""
MAX_MODELS = 4096
"""Models that are remembered. Clients make names up."""
LEAST, MOST = 0.01, 2.0
"""Tokens a byte, bounds of what is believed."""


class TokenEstimate:
    """Exponentially weighted mean of tokens a byte, by model. Not thread-safe."""

    __slots__ = ("_by_model", "_prior")

    def __init__(self, tokens_per_byte: float) -> None:
        """`tokens_per_byte`: of models of which nothing is known."""
        self._prior = tokens_per_byte
        self._by_model: dict[str, float] = {}

    def tokens(self, model: str, prompt_bytes: int) -> int:
        """At least one."""
        return int(self._by_model.get(model, self._prior) * prompt_bytes) or 1

    def observe(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """An engine has counted."""
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        seen = prompt_tokens / prompt_bytes
        if not LEAST <= seen <= MOST:
            seen = LEAST if seen < LEAST else MOST
        mean = self._by_model.get(model)
        if mean is None:
            if len(self._by_model) < MAX_MODELS:
                self._by_model[model] = seen
        else:
            self._by_model[model] = mean + WEIGHT * (seen - mean)
