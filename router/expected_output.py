"""How long an answer is likely to be, from those before it."""

from collections import OrderedDict

_UNKNOWN_TOKENS = 256
_SHARE_OF_MOST = 0.3
_A_NEW_ANSWER_WEIGHS = 0.1


class ExpectedOutput:
    """A moving average a (model, key): the key is whose answers are alike, as an API key or a route. One thread.

    Bounded: of more than `most` pairs the one that was used longest ago is forgotten.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def estimate(self, model: str, key: str, max_tokens: int | None) -> int:
        """Tokens, at least 1 and at most `max_tokens`. Without answers yet 0.3 * `max_tokens`, else 256."""
        mean = self._means.get((model, key))
        if mean is None:
            mean = _UNKNOWN_TOKENS if max_tokens is None else _SHARE_OF_MOST * max_tokens
        likely = max(1, round(mean))
        return likely if max_tokens is None or likely <= max_tokens else max(1, max_tokens)

    def observe(self, model: str, key: str, tokens: int) -> None:
        """An answer had so many tokens, by itself or at its limit. One that broke off says nothing."""
        pair = (model, key)
        means = self._means
        mean = means.get(pair)
        means[pair] = tokens if mean is None else mean + _A_NEW_ANSWER_WEIGHS * (tokens - mean)
        means.move_to_end(pair)
        if len(means) > self._most:
            means.popitem(last=False)
