"""What the store raises. Everything else that goes wrong is a miss."""


class StoreConfigError(ValueError):
    """The store cannot be opened as asked. One line: what, value, limit, remedy. Raised at open, never later."""
