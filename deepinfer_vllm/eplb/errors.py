"""What the room's callers can act on."""


class EplbError(ValueError):
    """An impossible placement, counts that are none, or a file that is no trace; one line."""
