"""What a user of the evaluation has to change."""


class EvaluationError(ValueError):
    """One line: what, which value, and what to do about it."""
