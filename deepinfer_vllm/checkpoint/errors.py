"""What the checkpoint commands refuse."""


class CheckpointError(ValueError):
    """A directory, a preset or a config that cannot be used. The message is one line: what, value, limit, remedy."""
