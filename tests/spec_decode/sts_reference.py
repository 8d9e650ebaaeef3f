"""Sequential temperature scaling draft by draft, in plain Python."""

from math import exp, isinf, log


def sigmoid_of_logit(confidence: float, temperature: float) -> float:
    """sigmoid(logit(c) / T)."""
    if confidence in (0.0, 1.0):
        return confidence
    return 1 / (1 + exp(-log(confidence / (1 - confidence)) / temperature))


def calibration_error(pairs: list[tuple[float, bool]], bins: int) -> float:
    """Of (predicted probability, whether it happened)."""
    error = 0.0
    for number in range(bins):
        inside = [(p, y) for p, y in pairs if min(int(p * bins), bins - 1) == number]
        if inside:
            predicted = sum(p for p, _ in inside) / len(inside)
            happened = sum(y for _, y in inside) / len(inside)
            error += len(inside) / len(pairs) * abs(predicted - happened)
    return error


Draft = tuple[list[float], int, int]
"""Confidences, how many tokens were verified, how many stood."""


def outcomes(drafts: list[Draft], temperatures: list[float]) -> list[tuple[float, bool]]:
    """What was predicted of the first len(temperatures) tokens standing, and whether they did, where that is known."""
    pairs = []
    for confidences, verified, stood in drafts:
        if verified >= len(temperatures):
            product = 1.0
            for confidence, temperature in zip(confidences, temperatures, strict=False):
                product *= sigmoid_of_logit(confidence, temperature)
            pairs.append((product, stood >= len(temperatures)))
    return pairs


def fit(drafts: list[Draft], positions: int, grid: int, span: float, bins: int) -> list[float]:
    """Temperatures, one after the other: a grid over -span..span of ln T, and one between the best one's neighbours."""
    found: list[float] = []
    for _ in range(positions):
        low, high, best = -span, span, 0.0
        for _ in range(2):
            candidates = [low + (high - low) * i / (grid - 1) for i in range(grid)] + [0.0, best]
            assert not any(isinf(c) for c in candidates)
            errors = {c: calibration_error(outcomes(drafts, [*found, exp(c)]), bins) for c in candidates}
            best = min(candidates, key=lambda c: (errors[c], abs(c)))
            step = (high - low) / (grid - 1)
            low, high = max(-span, best - step), min(span, best + step)
        found.append(exp(best))
    return found
