"""Errors that a client is told, and errors of the configuration."""


class RouterConfigError(ValueError):
    """A setting that cannot work: what, value, limit, remedy, in one line."""


class Refusal(Exception):
    """A request ends with this answer instead of an engine's. Rendered in the form of the API that was asked."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`code`: a fixed word, a label of metrics. `message`: what, value, limit, remedy, in one line."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
